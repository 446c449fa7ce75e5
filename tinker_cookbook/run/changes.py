"""Compares the settings and data of a run with those of the command that resumes it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import DIGEST_KEY, KINDS_KEY, LOST_KEY, TYPE_KEY, dump_config
from tinker_cookbook.run.data_record import UNKNOWN, DataRecord, data_changes, read_data_record
from tinker_cookbook.run.paths import CONFIG_FILE
from tinker_cookbook.run.weights_paths import SCHEME

# Settings of outputs, evaluations and the machine, which may change in a resumed run: a
# training step does not depend on them, except for rounding and for what fails or times out.
# base_dtype is not one of them: a quantised base has other weights.
_FREE = """
    log_path recipe_name behavior_if_log_dir_exists allow_config_change
    trackers wandb_project wandb_name session_name enable_trace span_chart_every
    backend base_url server_wait device dtype shard_base sampler vllm_python
    vllm_args vllm_timeout submit_ahead store num_replicas async_periodic_saves
    save_every save_every_tokens save_every_seconds
    rolling_save_every rolling_ttl_seconds ttl_seconds
    eval_every infrequent_eval_every evaluator_builders infrequent_evaluator_builders
    best_metric best_metric_mode early_stopping_patience data_report
    eval_temperature test_file_path test_path test_problems show_samples sample_max_tokens
    record num_groups_to_log rollout_json_export compute_post_kl kl_depth_edges
    rollout_error_tolerance rollout_timeout_seconds grader_timeout_seconds teacher_concurrency
""".split()  # noqa: SIM905 - one word for each setting, by subject
# Settings of the run's length: they change the learning rates, but not data or loss.
_LENGTH = frozenset({"num_epochs", "max_steps", "num_steps", "num_batches", "n_batches"})
# Those that determine how many problems a recipe generates.
_GENERATED = frozenset({"num_batches", "n_batches"})


def setting_changes(before: Any, now: Any) -> dict[str, tuple[str, str]]:
    """Returns dotted name -> old and new value, as text, of the settings in which two
    configurations (contents of ``config.json``) differ."""
    changes = _changes(before, now, "")
    return {name: (_shown(old), _shown(new, old)) for name, old, new in changes}


def changed_settings(log_path: str, config: Any) -> dict[str, str]:
    """Returns the settings in which ``config`` differs from the ``config.json`` in ``log_path``.

    The result maps the dotted name of a setting to ``name: old → new``. Settings that do not
    affect a training step are skipped, and so are settings that exist on only one side, which
    come from another version of the code.
    """
    file = Path(log_path) / CONFIG_FILE
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no file, or an invalid one
        return {}
    # Convert through JSON like the file, so that a tuple equals the list in the file.
    now = json.loads(json.dumps(dump_config(config)))
    changes = [change for change in _changes(before, now, "") if _leaf(change[0]) not in _FREE]
    return {name: f"{name}: {_shown(old)} → {_shown(new, old)}" for name, old, new in changes}


def check_same_settings(
    log_path: str, config: Any, allowed: bool, data: DataRecord | None = None
) -> list[str]:
    """Compares ``config`` and the ``data_record`` of its data with the run that it resumes.

    Returns a line for each change: the length of the run may change, and with ``allowed`` all
    settings and the data too. Raises ConfigurationError for other changes that affect a training
    step. A run without a record of its data gets a line that says so.
    """
    changes = changed_settings(log_path, config)
    of_data, notes = _changes_of_data(log_path, data, {_leaf(name) for name in changes})
    refused = {name: line for name, line in changes.items() if _leaf(name) not in _LENGTH}
    # A new length changes only the learning rates, so it is allowed and reported.
    if (refused or of_data) and not allowed:
        # Several settings may have the same name and value, such as the renderer's name.
        lines = {_leaf(name) + line.removeprefix(name): None for name, line in refused.items()}
        # A log_path names the newest checkpoint, and the run in it may have continued.
        moved = any(f": {SCHEME}" in line and f"→ {SCHEME}" in line for line in lines)
        hint = f" (the {SCHEME} path that the run began with)" if moved else ""
        what = " and ".join(["settings"] * bool(refused) + ["data"] * bool(of_data))
        raise ConfigurationError(
            f"log_path={log_path} holds a run with other {what} ({'; '.join([*lines, *of_data])}); "
            "its steps and the new ones would be mixed in one run. Continue with the original "
            f"{what}{hint}, give another log_path=…, start over with "
            "behavior_if_log_dir_exists=delete, or continue with the new ones on purpose: "
            "allow_config_change=true"
        )
    said = [f"changed since the run began: {line}" for line in (*changes.values(), *of_data)]
    if of_data:
        said.append("rows that are held out now may be among those trained on before")
    return [*said, *notes]


def _changes_of_data(
    log_path: str, data: DataRecord | None, changed: set[str]
) -> tuple[list[str], list[str]]:
    """Returns the changes of the data, and a line if they cannot be compared."""
    if data is None:
        return [], []
    before = read_data_record(log_path)
    if before is None:
        return [], [UNKNOWN]
    return data_changes(before, data, bool(changed & _LENGTH), bool(changed & _GENERATED)), []


def _changes(before: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, old and new value of the settings below ``name`` that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        if LOST_KEY in before or LOST_KEY in now:
            old, new = before.get(DIGEST_KEY), now.get(DIGEST_KEY)
            # Digests of functions of different versions of Python differ, as their prefixes do.
            if old and new and old != new and old.split(":")[:-1] == new.split(":")[:-1]:
                yield name, before, now
            return
        # Compare objects of the same class setting by setting, others as a whole. The class of a
        # nested object may have moved to another module since the run began.
        kinds = [str(one.get(TYPE_KEY, "")) for one in (before, now)]
        if kinds[0] == kinds[1] or (name and kinds[0].split(":")[1:] == kinds[1].split(":")[1:]):
            # A key on only one side comes from another version of the code.
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
    if before == now:
        return
    # Two texts may be different spellings of one path.
    if isinstance(before, str) and isinstance(now, str):
        with contextlib.suppress(OSError, ValueError):
            if Path(before).expanduser().samefile(Path(now).expanduser()):
                return
    yield name, before, now


def _leaf(name: str) -> str:
    """Returns the last part of a dotted name that is not a list index."""
    return next((part for part in reversed(name.split(".")) if not part.isdigit()), name)


def _shown(value: Any, before: Any = None) -> str:
    if isinstance(value, dict) and LOST_KEY in value:
        same = isinstance(before, dict) and before.get(LOST_KEY) == value[LOST_KEY]
        return f"{value[LOST_KEY]}{' with other content' if same else ''}"
    if isinstance(value, dict) and TYPE_KEY in value:
        return str(value[TYPE_KEY]).rpartition(":")[2]
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
