"""Trains on a custom task: ``rl.run(env=MyEnv, problems=[...], model_name=...)``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.demo.model import DEMO_MODEL
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.types import Env
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.training.config import setting
from tinker_cookbook.utils.command_line.entrypoint import run_to_end
from tinker_cookbook.utils.command_line.foreign_names import hint_for
from tinker_cookbook.utils.command_line.keys import aliases_of


class _Problems(Sequence[Any]):
    """Problems of a run; ``config.json`` stores only their short ``repr``, not a long list."""

    def __init__(self, problems: Sequence[Any]) -> None:
        self._problems = problems

    def __getitem__(self, index: Any) -> Any:
        return self._problems[index]

    def __len__(self) -> int:
        return len(self._problems)

    def __repr__(self) -> str:
        return f"<{len(self)} problems>"

    def data_sources(self) -> dict[str, Any]:
        return {"": self._problems}


@chz.chz
class TaskDatasetBuilder(ProblemDatasetBuilder):
    """Groups of environments for a sequence of problems, all created by one callable."""

    env: Callable[..., Env] = chz.field(doc="Called as env(problem, renderer=renderer)")
    problems: Sequence[Any] = chz.field(doc="Problems to train on")
    test_problems: Sequence[Any] = setting((), "Problems of the test set")

    def check(self) -> None:
        """Raises ``ConfigurationError`` if there are no problems."""
        if not len(self.problems):
            raise ConfigurationError("problems: got none, expected at least one")

    def load(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the problems."""
        # Create one environment now, so that a wrong ``env`` fails before the model is loaded.
        renderer = self.renderer()
        try:
            inspect.signature(self.env).bind(self.problems[0], renderer=renderer)
        except TypeError as error:
            raise ConfigurationError(
                f"env: it cannot be called as env(problem, renderer=renderer): {error}; give it a "
                "first parameter for the problem and one with the name renderer"
            ) from None
        made = self.env(self.problems[0], renderer=renderer)
        if not isinstance(made, Env):
            raise ConfigurationError(
                f"env: it returned a {type(made).__name__}, expected an Env (such as a ProblemEnv)"
            )
        return self.problems, self.test_problems

    def env_thunk(self, problem: Any, renderer: Renderer) -> Callable[[], Env]:
        """Returns a call of ``env``."""
        return partial(self.env, problem, renderer=renderer)


@chz.chz
class TaskConfig(train.Config):
    """Settings of ``rl.run``: those of the loop, with the defaults of the recipes."""

    recipe_name: str = "rl_run"
    model_name: str = DEMO_MODEL
    env: Callable[..., Env] | None = setting(None, "Creates an environment")
    problems: Sequence[Any] = setting((), "Problems to train on")
    test_problems: Sequence[Any] = setting((), "Problems of the test set")
    groups_per_batch: int = 8
    group_size: int = 8
    learning_rate: float | None = None

    def build_dataset(self) -> TaskDatasetBuilder:
        """Returns the problems."""
        assert self.env is not None
        return self.builder_of(
            TaskDatasetBuilder,
            # The config is written to a file, where a long list would only add clutter.
            problems=_Problems(self.problems),
            test_problems=_Problems(self.test_problems) if len(self.test_problems) else (),
        )


def run(
    env: Callable[..., Env],
    problems: Sequence[Any],
    model_name: str = DEMO_MODEL,
    *,
    test_problems: Sequence[Any] = (),
    **settings: Any,
) -> Path:
    """Trains a model on a task, or resumes the run in ``log_path``; returns the run's folder.

    Args:
        env: A ``ProblemEnv`` subclass or a function; ``env(problem, renderer=renderer)`` returns
            the environment of one episode.
        problems: Any sequence with ``len`` and indexing: a list of strings, tuples or dicts, or a
            dataset.
        model_name: Hub name or local folder of the model.
        test_problems: Held-out problems, evaluated every ``eval_every`` steps.
        **settings: Fields of ``rl.train.Config``, with the same defaults as in
            ``python -m recipes.math_rl.train --help=all``: ``batch_size``, ``group_size``,
            ``learning_rate``, ``max_tokens``, ``max_steps``, ``log_path`` (by default
            ``/tmp/tinker-examples/rl_run_CLASS``, of a function ``rl_run_SCRIPT_FUNCTION``) …

    Raises:
        ConfigurationError: A setting is unknown, of the wrong type, or invalid. Nothing was
            sampled or deleted.
    """
    return run_to_end(run_async(env, problems, model_name, test_problems=test_problems, **settings))


async def run_async(
    env: Callable[..., Env],
    problems: Sequence[Any],
    model_name: str = DEMO_MODEL,
    *,
    test_problems: Sequence[Any] = (),
    **settings: Any,
) -> Path:
    """Asynchronous version of :func:`run`, for use within a running event loop."""
    # Check the names as the command line does.
    fields, aliases = chz.chz_fields(train.Config), aliases_of(train.Config)
    named: dict[str, Any] = {}
    for name, value in {"model_name": model_name, **settings}.items():
        key = aliases.get(name, name)
        if key not in fields:
            hint = hint_for(name, fields) or nearest(name, [*fields, *aliases])
            raise ConfigurationError(f"{name}: rl.run has no such setting{hint}")
        # The caller may have passed both an alias and the full name.
        if key in named:
            raise ConfigurationError(f"{key}: got it twice, also as {name}; leave one out")
        named[key] = value
    try:
        config = chz.Blueprint(TaskConfig).apply(named).make()
    except TypeError as error:  # the message of chz has the setting and both types
        raise ConfigurationError(f"rl.run: {error}") from error
    if "recipe_name" not in named and (name := getattr(env, "__name__", "")).isidentifier():
        # Two tasks must not go to the same folder. A lambda has no such name.
        parts = ["rl_run", "" if inspect.isclass(env) else _script_of(env), name]
        config = chz.replace(config, recipe_name="_".join(filter(None, parts)))
    config = chz.replace(config, env=env, problems=problems, test_problems=test_problems)
    await train.main(config)
    return local_path(config.run_path)


def _script_of(function: Any) -> str:
    """Returns the name of the script or module of a function; empty in a notebook."""
    module = str(function.__module__)
    if module == "__main__":
        return Path(getattr(sys.modules[module], "__file__", None) or "").stem
    return module.rpartition(".")[2]
