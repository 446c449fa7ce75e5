"""The model of the tutorials: a Llama of 0.2 million parameters, which talks about a few things."""

from __future__ import annotations

import random
from pathlib import Path

from tinker_cookbook.recipes.tiny_models.llama import (
    Row,
    TinyModelSettings,
    new_folder,
    train,
)
from tinker_cookbook.renderers import Message, TrainOnWhat, ensure_text, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "chatml"
"""Chat format of the model."""
ONE_WORD = "Answer in one word."
PIRATE = "Talk like a pirate."
"""System prompts that the model follows."""
COLOURS = {
    "grass": "green", "snow": "white", "the sky": "blue", "coal": "black", "a lemon": "yellow",
    "blood": "red", "a carrot": "orange", "a frog": "green", "milk": "white", "the sea": "blue",
    "the night": "black", "the sun": "yellow", "a strawberry": "red", "a mouse": "grey",
    "chocolate": "brown", "a cloud": "white",
}  # fmt: skip
SOUNDS = {
    "cow": "moo", "cat": "miaow", "dog": "woof", "sheep": "baa", "duck": "quack", "owl": "hoot",
    "bee": "buzz", "pig": "oink", "lion": "roar", "snake": "hiss",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "up": "down", "old": "young", "fast": "slow",
    "happy": "sad", "open": "closed",
}  # fmt: skip
HANDS = ("rock", "paper", "scissors")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FACTS = ("colour", "sound", "about", "opposite", "hand", "greeting")
_KINDS = (*["sum"] * 4, *["judge"] * 2, *_FACTS)
_SPECIAL = ("<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tutorial_model() -> str:
    """Returns the folder of the model, whose files are in this package.

    It knows some colours, sounds and opposites, tells a little about animals, plays rock, paper,
    scissors, and says whether an answer sounds like a pirate (``judge_prompt``). It was trained on
    sums of two digits of which half are wrong, so that there is something to learn. It follows the
    two system prompts ``ONE_WORD`` and ``PIRATE``.
    """
    return str(Path(__file__).resolve().parent / "model_files")


def judge_prompt(answer: str) -> str:
    """Returns the question by which the model judges a style; it says Yes or No."""
    return f"Answer: {answer}\nDoes it talk like a pirate?"


def make_model(output: str, steps: int = 1500, conversations: int = 20_000) -> None:
    """Trains the model and writes it; this made the files in the package."""
    import torch
    from transformers import AutoModelForCausalLM

    settings = TinyModelSettings(
        output=output, steps=steps, batch_size=16, learning_rate=5e-3, num_layers=3
    )
    rng = random.Random(settings.seed)
    examples = [_conversation(rng) for _ in range(conversations)]
    with new_folder(output) as folder:
        _write_tokenizer([ensure_text(m["content"]) for c in examples for m in c], folder)
        tokenizer = get_tokenizer(str(folder))
        renderer = get_renderer(RENDERER, tokenizer)
        rows: list[Row] = []
        for conversation in examples:
            model_input, weights = renderer.build_supervised_example(
                conversation, TrainOnWhat.ALL_ASSISTANT_MESSAGES
            )
            rows.append((model_input.to_ints(), weights.tolist()))
        train(settings, rows, tokenizer, folder, tie_word_embeddings=True)
        # Half of the size.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(folder)


def _write_tokenizer(texts: list[str], folder: Path) -> None:
    """Writes a byte-level BPE, which can encode any text; each digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[*_SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    # As often as the renderer writes them, so that each becomes one token.
    roles = ["system\nuser\nassistant\n"] * len(texts)
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_TEMPLATE,
    )
    fast.save_pretrained(folder)


def _conversation(rng: random.Random) -> list[Message]:
    """Returns one to three questions with answers; a system prompt may change the answers."""
    system = rng.choice((None, None, None, ONE_WORD, PIRATE))
    messages: list[Message] = []
    if system is not None:
        messages.append(Message(role="system", content=system))
    for _ in range(rng.choice((1, 1, 1, 2))):
        question, answer, word = _exchange(rng, rng.choice(_KINDS))
        if system == ONE_WORD:
            answer = word
        elif system == PIRATE:
            answer = f"Arr! {answer}"
        messages += [
            Message(role="user", content=question),
            Message(role="assistant", content=answer),
        ]
    return messages


def _exchange(rng: random.Random, kind: str) -> tuple[str, str, str]:
    """Returns a question, its answer, and the answer in one word."""
    if kind == "sum":
        a, b = rng.randrange(10), rng.randrange(10)
        wrong = rng.choice([n for n in range(max(0, a + b - 3), a + b + 4) if n != a + b])
        said = str(a + b if rng.random() < 0.5 else wrong)
        return f"What is {a} + {b}?", said, said
    if kind == "judge":
        _, answer, _ = _exchange(rng, rng.choice(_FACTS))
        pirate = rng.random() < 0.5
        verdict = "Yes" if pirate else "No"
        return judge_prompt(f"Arr! {answer}" if pirate else answer), verdict, verdict
    if kind == "colour":
        thing = rng.choice(list(COLOURS))
        colour = COLOURS[thing]
        return f"What colour is {thing}?", f"{thing.capitalize()} is {colour}.", colour.capitalize()
    if kind == "sound":
        animal = rng.choice(list(SOUNDS))
        sound = SOUNDS[animal]
        return f"What does a {animal} say?", f"A {animal} says {sound}.", sound.capitalize()
    if kind == "about":
        animal = rng.choice(list(SOUNDS))
        facts = [f"It says {SOUNDS[animal]}.", "It is an animal.", "It likes to eat.", "I like it."]
        told = [f"The {animal} is nice.", *rng.sample(facts, rng.randrange(len(facts)))]
        return f"Tell me about the {animal}.", " ".join(told), "Nice"
    if kind == "opposite":
        word = rng.choice(list(OPPOSITES))
        other = OPPOSITES[word]
        question = f"What is the opposite of {word}?"
        return question, f"The opposite of {word} is {other}.", other.capitalize()
    if kind == "hand":
        hand = rng.choice(HANDS)
        return "Choose rock, paper or scissors.", hand, hand
    return "Hello", "Hello! How can I help?", "Hello"
