"""A run with tools that was killed and continued equals one that was never killed, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
from pathlib import Path

import pytest
from recipe_runs import REPO, RecipeRuns

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.replay.command import ReplaySettings, compare

pytestmark = pytest.mark.slow

GROUP_DONE = "tinker_cookbook.rl.loop.sources:RolloutWorker.count"


class ToolRuns(RecipeRuns):
    """Runs of ``tool_stories``: 4 iterations of a group of 4, two calls an episode."""

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__(folder, model, "tool_stories", "save_every=3 eval_every=2")

    def arguments(self, name: str, behavior: str = "raise") -> list[str]:
        return [*super().arguments(name, behavior), f"visits={self.folder / f'{name}-visits'}"]

    def environment(self, **extra: str) -> dict[str, str]:
        path = os.pathsep.join([str(REPO), str(Path(__file__).parent)])
        return {**super().environment(), "PYTHONPATH": path, **extra}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stories_model):
    """The finished run that was never killed."""
    place = ToolRuns(tmp_path_factory.mktemp("tool-resume"), stories_model)
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    return place


def test_recorded_results_make_a_resumed_run_equal(runs):
    """Killed between sampling and training: without the record, repeated calls return 2, not 1."""
    # One group at a time, so no call is between its effect and its record at that moment.
    runs.check_killed_and_resumed("killed", GROUP_DONE, 4, "after")
    rows = [json.loads(line) for line in records(runs, "killed")]
    assert {row["result"]["messages"][0]["content"] for row in rows} == {"1"}
    # Each place has one line: what was recorded before the kill was not run again.
    places = [row["place"] for row in rows]
    assert len(places) == len(set(places)) == len(records(runs, "straight"))
    visits = {path.read_text() for path in (runs.folder / "killed-visits").iterdir()}
    assert visits == {"1"}


def records(runs: ToolRuns, name: str) -> list[str]:
    return (runs.folder / name / "tool_results.jsonl").read_text().splitlines()


def test_a_replay_uses_the_recorded_results(runs, monkeypatch, tmp_path):
    """15 s. The tool returns something else each time."""
    folder = runs.folder / "straight"
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", runs.environment()["TINKER_COOKBOOK_HOME"])

    def replayed(**settings):
        return asyncio.run(compare(ReplaySettings(run=str(folder), step=2, **settings)))

    for settings in ({}, {"what": "grading"}, {"what": "update"}):
        result = replayed(**settings)
        assert result.identical, list(result.lines())
    # The tool runs: its first calls from the place of a replay return 1, as those of the run did.
    assert replayed(what="grading", tools="live").identical
    for settings in ({"what": "grading", "tools": "live"}, {"tools": "live"}):
        lines = "\n".join(replayed(**settings).lines())
        assert re.search(r"group 0, episode 3, turn 1, prompt: token \d+ was \d+, is \d+", lines)
    # A test of one episode has its results, too.
    file = tmp_path / "test_episode.py"
    replayed(group=0, episode=1, pytest=str(file))
    written = runpy.run_path(str(file))
    written["test_the_grading_of_the_episode"]()
    written["CALLS"][1].pop()
    with pytest.raises(DataError, match=r"the result of call 1 \(.*\) was not recorded"):
        written["test_the_grading_of_the_episode"]()
