"""Episodes written down as text, with a tokenizer of one token a byte and two special ones."""

from __future__ import annotations

from functools import cache

import tinker

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import StopReason, Trajectory, TrajectoryGroup, Transition

END, ASK = "<|end|>", "<|ask|>"


@cache
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END)
    made.add_special_tokens({"additional_special_tokens": [ASK]})
    return made


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def talk(*turns, stop_reason=StopReason.COMPLETED, final="", **extra) -> Trajectory:
    """Each turn is (what is new in the prompt, the answer, reward) and maybe metrics and logs.

    An answer that does not end in ``END`` was cut off.
    """
    tokens: list[int] = []
    transitions: list[Transition] = []
    for i, (new, answer, reward, *rest) in enumerate(turns):
        tokens = [*tokens, *encode(new)]
        sampled = encode(answer)
        reason = "stop" if answer.endswith(END) else "length"
        transitions.append(
            Transition(
                tinker.ModelInput.from_ints(tokens),
                TokensWithLogprobs(sampled, [-0.5] * len(sampled), reason),
                reward,
                i == len(turns) - 1,
                dict(rest[0]) if rest else {},
                dict(rest[1]) if len(rest) > 1 else {},
            )
        )
        tokens = [*tokens, *sampled]
    last = tinker.ModelInput.from_ints([*tokens, *encode(final)])
    return Trajectory(transitions, last, stop_reason, **extra)


def group_of(*trajectories: Trajectory, **extra) -> TrajectoryGroup:
    size = len(trajectories)
    given = {"final_rewards_G": [0.0] * size, "metrics_G": [{} for _ in range(size)], **extra}
    return TrajectoryGroup(list(trajectories), **given)


def answers(*rewards: float, text: str = "42", prompt: str = f"{ASK}6*7?", **extra):
    """A group of single answers, all different."""
    return group_of(
        *(talk((prompt, f"{text} {i}{END}", reward)) for i, reward in enumerate(rewards)), **extra
    )
