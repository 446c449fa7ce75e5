"""Environments of verifiers 0.1.9: one turn, and several turns with words of the environment."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

STARTS = ("Once upon a time", "Lily had a", "The dog ran", "Tom saw a big")


def share(completion, answer, **_) -> float:
    text = " ".join(m["content"] for m in completion if m["role"] == "assistant")
    return text.count(answer) / max(1, len(text))


def first_of_group(states, **_) -> list[float]:
    """A reward of the whole group: 1 for the longest answer."""
    sizes = [sum(len(m["content"]) for m in state["completion"]) for state in states]
    return [float(i == sizes.index(max(sizes))) for i in range(len(sizes))]


class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "Go on."}]


class Broken(vf.SingleTurnEnv):
    async def setup_state(self, state):
        raise vf.InfraError("no sandbox")


def load_environment(letter: str = "a", turns: int = 1, broken: bool = False):
    rows = [{"question": start, "answer": letter} for start in STARTS]
    rubric = vf.Rubric(funcs=[share, first_of_group], weights=[2.0, 0.5])
    common = {"dataset": Dataset.from_list(rows), "rubric": rubric, "system_prompt": "Be brief."}
    if broken:
        return Broken(**common)
    return Talk(max_turns=turns, **common) if turns > 1 else vf.SingleTurnEnv(**common)
