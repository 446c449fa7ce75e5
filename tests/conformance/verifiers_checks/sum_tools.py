"""Taskset of verifiers 0.4 with a tool: add two numbers by calling it."""

from __future__ import annotations

import verifiers.v1 as vf


class AddTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.total))

    @vf.metric
    async def results(self, trace) -> float:
        return float(len(trace.tool_messages))


class SumTools(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        yield SumTask(SumData(prompt="What is 19 + 23?", total=42), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [AddTools(vf.SharedToolsetConfig())]


__all__ = ["SumTools"]


if __name__ == "__main__":
    AddTools.run()
