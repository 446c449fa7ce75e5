"""Settings that changed between the run in a log folder and the command that continues it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.run_folder.config_io import (
    CONFIG_FILE,
    KINDS_KEY,
    LOST_KEY,
    TYPE_KEY,
    dump_config,
)

# Where and how often things are written, evaluated or shown, and where is computed: a step means
# the same whatever these are.
_FREE = frozenset(
    {
        "log_path",
        "recipe_name",
        "behavior_if_log_dir_exists",
        "allow_config_change",
        "wandb_project",
        "wandb_name",
        "session_name",
        "enable_trace",
        "span_chart_every",
        "backend",
        "base_url",
        "device",
        "dtype",
        "submit_ahead",
        "store",
        "num_replicas",
        "async_periodic_saves",
        "save_every",
        "save_every_tokens",
        "save_every_seconds",
        "rolling_save_every",
        "rolling_ttl_seconds",
        "ttl_seconds",
        "eval_every",
        "infrequent_eval_every",
        "eval_temperature",
        "evaluator_builders",
        "infrequent_evaluator_builders",
        "test_file_path",
        "test_path",
        "show_samples",
        "sample_max_tokens",
        "num_groups_to_log",
        "rollout_json_export",
        "compute_post_kl",
        "rollout_error_tolerance",
        "rollout_timeout_seconds",
        "grader_timeout_seconds",
        "teacher_concurrency",
    }
)
# How long the run is: its learning rates change, but the data and the loss do not.
_LENGTH = frozenset({"num_epochs", "max_steps", "num_steps", "num_batches", "n_batches"})

_Change = tuple[str, Any, Any]


def changed_settings(log_path: str, config: Any) -> dict[str, str]:
    """Returns the settings in which ``config`` differs from the ``config.json`` in ``log_path``.

    Those that only say where and how often something is written, shown or evaluated are left out,
    and so are settings that one of the two does not have: another version of the code wrote them.

    Returns:
        ``name: old → new`` by the dotted name of the setting.
    """
    file = Path(log_path) / CONFIG_FILE
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or one that a person has edited
        return {}
    now = json.loads(json.dumps(dump_config(config)))
    changes = [change for change in _changes(before, now, "") if _leaf(change[0]) not in _FREE]
    return {name: f"{name}: {_shown(old)} → {_shown(new)}" for name, old, new in changes}


def check_same_settings(log_path: str, config: Any, allowed: bool) -> list[str]:
    """Compares ``config`` with the run in ``log_path`` that it is to continue.

    Args:
        log_path: The run's folder.
        config: The settings of the command that continues it.
        allowed: Whether a change of what a step means was asked for.

    Returns:
        A line on each setting that changed and may: the length of the run, and with ``allowed``
        all others.

    Raises:
        ConfigurationError: A setting changed that decides what a step means.
    """
    changes = changed_settings(log_path, config)
    refused = {name: line for name, line in changes.items() if _leaf(name) not in _LENGTH}
    if refused and not allowed:
        # A setting often stands in several places (the renderer's name, say).
        lines = {_leaf(name) + line.removeprefix(name): None for name, line in refused.items()}
        raise ConfigurationError(
            f"log_path={log_path} holds a run with other settings ({'; '.join(lines)}); its steps "
            "and the new ones would be mixed in one run. Continue with the settings as they were, "
            "give another log_path=…, start over with behavior_if_log_dir_exists=delete, or "
            "continue with the new ones on purpose: allow_config_change=true"
        )
    return [f"changed since the run began: {line}" for line in changes.values()]


def _changes(before: Any, now: Any, name: str) -> Iterator[_Change]:
    """The values below ``name`` that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        if LOST_KEY in before or LOST_KEY in now:
            return  # a function without a name: what it does cannot be compared
        if before.get(TYPE_KEY) == now.get(TYPE_KEY):
            for key in before.keys() & now.keys() - {TYPE_KEY, KINDS_KEY}:
                yield from _changes(before[key], now[key], f"{name}.{key}" if name else key)
            return
        if not name:  # another recipe that writes to the same folder
            yield TYPE_KEY, before, now
            return
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _changes(old, new, f"{name}.{index}")
        return
    if before != now and not _same_file(before, now):
        yield name, before, now


def _same_file(before: Any, now: Any) -> bool:
    """Returns whether two texts are two spellings of one file or folder."""
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    try:
        return Path(before).expanduser().samefile(Path(now).expanduser())
    except (OSError, ValueError):
        return False


def _leaf(name: str) -> str:
    """Returns the setting's own name; that of the list for an item of one."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    return parts[-1] if parts else name


def _shown(value: Any) -> str:
    if isinstance(value, dict) and TYPE_KEY in value:
        return str(value[TYPE_KEY]).rpartition(":")[2]
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
