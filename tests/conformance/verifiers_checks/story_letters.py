"""Taskset of verifiers 0.4 with one turn: a story, whose reward is its share of one letter."""

from __future__ import annotations

import verifiers.v1 as vf

STARTS = ("Once upon a time", "Lily had a", "The dog ran", "Tom saw a big", "One day", "Mom said")


class LetterData(vf.TaskData):
    letter: str


class LetterTask(vf.Task[LetterData]):
    @vf.reward(weight=2.0)
    async def share(self, task, trace) -> float:
        text = trace.last_reply
        return text.count(task.letter) / max(1, len(text))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class LetterConfig(vf.TasksetConfig):
    letter: str = "a"


class StoryLetters(vf.Taskset[LetterTask, LetterConfig]):
    def load(self):
        for start in STARTS:
            data = LetterData(prompt=start, system_prompt="Be brief.", letter=self.config.letter)
            yield LetterTask(data, self.config.task)


__all__ = ["StoryLetters"]
