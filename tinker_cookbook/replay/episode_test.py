"""Writes a recorded episode as a test of its environment's grading."""

from __future__ import annotations

import json
import pprint
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.vocabulary import token_texts
from tinker_cookbook.replay.environments import recorded_builder
from tinker_cookbook.replay.grading import (
    Answer,
    answers_of,
    calls_of,
    graded,
    is_graded_together,
)
from tinker_cookbook.replay.recorded_run import RecordedRun
from tinker_cookbook.replay.trajectories import Rows
from tinker_cookbook.rl.config import Config
from tinker_cookbook.run.config import KINDS_KEY, TYPE_KEY, dump_config

_SETTINGS = (
    "model_name",
    "renderer_name",
    "seed",
    "max_tokens",
    "dataset_builder",
    "dataset_configs",
    "rollout_config",
    "termination",
)
"""Settings that determine environments and their limits."""

_TEMPLATE = '''\
"""Grading of a recorded episode: step {step}, {split}, group {group}, episode {episode} of
{run}

Written by: python -m tinker_cookbook.replay RUN {words} --pytest out={name}
"""

from tinker_cookbook.replay.grading import Answer, grade

# The settings of the run that its environments depend on, as in its config.json.
CONFIG = {config}

# What the model answered in each turn of each episode{together}, as tokens.
ANSWERS = {answers}
{calls}

def test_the_grading_of_the_episode():
    graded = grade(
        CONFIG,
        split={split!r},
        batch={batch!r},
        group={place},
        episode={episode},
        answers=ANSWERS,
        tool_calls={given_calls},
    )
    assert graded.problem == {problem!r}, "the data have another problem at this place"
    assert graded.rewards == {rewards}
    assert graded.reward == {reward!r}
    assert graded.stop_reason == {stop_reason!r}
    assert graded.metrics == {metrics}
'''


async def write_test(
    run: RecordedRun, group: Rows, episode: int, split: str, step: int, path: Path
) -> None:
    """Writes the test of one episode of the ``group`` with these rows.

    Raises:
        ConfigurationError: The file exists, or it cannot be written.
    """
    config = run.config
    assert isinstance(config, Config)
    if path.exists():
        raise ConfigurationError(f"pytest: {path} exists; give another file")
    builder = await recorded_builder(config, group, split)
    together = is_graded_together(builder)
    rows = group if together else [row for row in group if row["member"] == episode]
    own = [row for row in rows if row["member"] == episode]
    expected, first = graded(own), own[0]
    calls = {member: made for member, made in calls_of(rows).items() if made}
    train = split == "train"
    words = f"step={step} group={first['group']} episode={episode}"
    comment = "# The tool calls of each episode, with their results."
    text = _TEMPLATE.format(
        step=step,
        split=split,
        group=first["group"],
        episode=episode,
        run=run.record.log_path.absolute(),
        words=words if train else f"{words} split={split}",
        name=path.name,
        config=_text(_settings(config)),
        together=" of the group, which is graded together" if together else "",
        answers=_answers(run, answers_of(rows)),
        calls=f"\n{comment}\nCALLS = {_text(calls)}\n" if calls else "",
        given_calls="CALLS" if calls else "{}",
        batch=first["batch"] if train else 0,
        place=first["batch_group"] if train else first["group"],
        problem=expected.problem,
        rewards=expected.rewards,
        reward=expected.reward,
        stop_reason=expected.stop_reason,
        metrics=_text(expected.metrics, indent=4),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"pytest: {path} cannot be written: {error.strerror}; give another file as out="
        ) from error


def _settings(config: Config) -> dict[str, Any]:
    # Through JSON, so that tuples are what a file of settings has.
    data = json.loads(json.dumps(dump_config(config)))
    kept = {name: data[name] for name in (TYPE_KEY, *_SETTINGS) if data.get(name) is not None}
    return {name: _without_defaults(kept[name], getattr(config, name, None)) for name in kept}


def _without_defaults(data: Any, value: Any) -> Any:
    """Returns the dumped ``value`` without the settings that have their default."""
    if isinstance(data, list) and isinstance(value, list):
        return [_without_defaults(*pair) for pair in zip(data, value, strict=True)]
    if not (isinstance(data, dict) and chz.is_chz(value)):
        return data
    fields = chz.chz_fields(value)
    defaults = {
        name: field._default_factory() if callable(field._default_factory) else field._default
        for name, field in fields.items()
    }
    kept = {
        name: _without_defaults(given, getattr(value, name, None))
        for name, given in data.items()
        if name not in defaults or getattr(value, name) != defaults[name]
    }
    kinds = kept.pop(KINDS_KEY, {})
    kinds = {name: kind for name, kind in kinds.items() if name.partition("/")[0] in kept}
    return kept | ({KINDS_KEY: kinds} if kinds else {})


def _answers(run: RecordedRun, answers: Mapping[int, Sequence[Answer]]) -> str:
    tokens = {token for turns in answers.values() for turn in turns for token in turn.tokens}
    texts = token_texts(run.record.log_path, tokens)
    lines = ["{"]
    for member, turns in answers.items():
        lines.append(f"    {member}: [")
        for turn in turns:
            # A token of a part of a character has no text.
            parts = [texts.get(token, "") for token in turn.tokens]
            text = "".join(part if isinstance(part, str) else "?" for part in parts)
            lines += [f"        # {text!a}", f"        {turn!r},"]
        lines.append("    ],")
    return "\n".join([*lines, "}"])


def _text(value: Any, indent: int = 0) -> str:
    text = pprint.pformat(value, width=96 - indent, sort_dicts=False)
    return text.replace("\n", "\n" + " " * indent)
