"""A model that says what it is told to: each token has one that follows it.

Attention and MLP write nothing, so the state at a token is its embedding, and the head has at the
row of the next token a multiple of it. At temperature 0 it walks the script.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from tiny_vlm import tiny_vlm

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WHOLE = ["<tool_call>\n", CALL, "\n</tool_call>"]
TEXT = "🙂é!"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letter_tokenizer() -> Any:
    """A token for each byte, after the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=TEMPLATE,
    )


def make_seeing_model(folder: Path) -> str:
    """A Qwen3-VL of random weights, with a tokenizer and an image ``picture.png``."""
    from PIL import Image

    tokenizer = letter_tokenizer()
    marks = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad")]
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[3:], *marks]})
    tokenizer.save_pretrained(folder)
    Image.linear_gradient("L").resize((48, 32)).save(folder / "picture.png")
    return str(tiny_vlm(folder, "qwen3_vl"))


def make_scripted_model(folder: Path) -> str:
    """Behind a line break it calls ``add``; behind ``?`` it says ``TEXT`` and ends."""
    import torch
    from tokenizers import AddedToken
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = letter_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in WHOLE])
    tokenizer.save_pretrained(folder)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    call = [*ids("\n"), *(ids(text)[0] for text in WHOLE), *ids("<|im_end|>")]
    text = [*ids("?"), *ids(TEXT), *ids("</s>")]
    size = 512
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embedding = torch.eye(len(tokenizer), size)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.normal_(std=0.01)
        for chain in (call, text):
            assert len(set(chain)) == len(chain)
            for before, after in pairwise(chain):
                model.lm_head.weight[after] += embedding[before]
    model.save_pretrained(folder)
    return str(folder)
