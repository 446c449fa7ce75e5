"""Tool results by the place of their call, across processes that were killed (under 1 s)."""

from __future__ import annotations

import asyncio
import json

from tinker_cookbook.renderers import ToolCall
from tinker_cookbook.rl.rollouts.place import RolloutPlace, at_place, enter_member
from tinker_cookbook.tool_use import AgentToolMessageEnv, recording, simple_tool_result, tool


class Clock:
    """A tool that never returns the same twice."""

    now = 0

    @tool(record=True)
    def time(self, zone: str = "") -> str:
        Clock.now += 1
        return simple_tool_result(
            f"{zone}{Clock.now}", metrics={"now": Clock.now}, metadata={"when": object}
        )

    @tool
    def unrecorded(self) -> int:
        Clock.now += 1
        return Clock.now

    @tool(record=True)
    def gone(self) -> str:
        raise ConnectionError("no network")


def call(name, **arguments):
    body = ToolCall.FunctionBody(name=name, arguments=json.dumps(arguments))
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall(function=body)]}


def episode(folder, *calls, position=("train", 0, 0), member=0, attempt=0):
    """The texts of an episode's results at a place of a run, as a new process finds them."""
    recording._journals.clear()
    clock = Clock()
    tools = [clock.time, clock.unrecorded, clock.gone]
    env = AgentToolMessageEnv(tools, [], 9, lambda history: (0.0, {}), on_unavailable="report")

    async def run():
        place = None if folder is None else RolloutPlace(str(folder), position)
        with at_place(place):
            enter_member(member, attempt)
            for one in calls:
                await env.step(one)

    asyncio.run(run())
    return [record.text for record in env.episode.calls], env.episode


def test_a_repeated_call_gets_its_first_result(tmp_path):
    calls = [call("time"), call("time", zone="Z"), call("time")]
    first, one = episode(tmp_path, *calls)
    assert first[0] != first[2]
    again, other = episode(tmp_path, *calls)
    assert again == first
    assert [c.result.metrics for c in other.calls] == [c.result.metrics for c in one.calls]
    # Another place, or another call at the same place, is run.
    for changed in (
        {"member": 1},
        {"attempt": 1},
        {"position": ("train", 1, 0)},
        {"position": ("test", 0, 0)},
    ):
        assert set(episode(tmp_path, *calls, **changed)[0]).isdisjoint(first)
    texts, _ = episode(tmp_path, call("time", zone="X"), calls[1])
    assert texts[0] not in first
    assert texts[1] == first[1]
    assert episode(tmp_path, *calls)[0][0] != first[0]  # the newest line of a place counts


def test_a_torn_line_is_no_result_and_hides_no_other(tmp_path):
    first, _ = episode(tmp_path, call("time"), call("time"))
    path = tmp_path / recording.FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:30])  # killed within a write
    again, _ = episode(tmp_path, call("time"), call("time"))
    assert again[0] == first[0]
    assert again[1] != first[1]
    assert episode(tmp_path, call("time"), call("time"))[0] == again
