"""The short programs of ``scripts/`` on the story model, in one process (8 s)."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from homes import new_home
from recipe_runs import REPO

pytestmark = pytest.mark.slow
EXPECTED = {
    "setup-check": r"The capital of France.+",
    "supervised-training": r"step 7: loss per token",
    "rl-training": r"step 4: mean reward 0\.\d+, [1-9]\d* samples trained",
    "sampling-demo": r"Name a colour\.\n  .*\n  .*\nWhat is the capital of Italy\?\n  ",
    "checkpoint-management": r"deleted the one for training",
    "vision-training": r"red: This is red\.\ngreen: This is green\.\nblue: This is blue\.",
}


@pytest.fixture(scope="module")
def run(stories_model, tmp_path_factory):
    """``run(name)`` runs a script on the bundled engine; ``patches`` replace names in it."""

    patch = pytest.MonkeyPatch()

    def run(name, **patches):
        spec = spec_from_file_location(name.replace("-", "_"), REPO / "scripts" / f"{name}.py")
        module = module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # chz looks it up
        spec.loader.exec_module(module)
        vars(module).update(patches)
        # The vision script makes a model that sees; the story model does not.
        model = {} if name == "vision-training" else {"model_name": stories_model}
        result = module.main(module.Config(**model, backend="local"))
        if inspect.isawaitable(result):
            asyncio.run(result)

    patch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path_factory.mktemp("home")))
    yield run
    patch.undo()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_runs_to_its_end(run, name, capsys):
    # The story model does not add, so that all its answers would have the reward 0.
    run(name, **{"reward_of": lambda answer, _: len(answer) % 2} if name == "rl-training" else {})
    printed = capsys.readouterr().out
    assert re.search(EXPECTED[name], printed), printed
    if name == "supervised-training":
        losses = [float(loss) for loss in re.findall(r"loss per token (\S+)", printed)]
        assert losses[-1] < losses[0] - 0.5
        assert not any(map(math.isnan, losses))
    if name == "checkpoint-management":
        after, loaded, resumed = re.findall(r"(?:checkpoint|loaded|from it): (\d\S*\d)", printed)
        assert after == loaded == resumed
