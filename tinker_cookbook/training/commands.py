"""Command lines to continue a run, to plot it, and to use its weights."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.run.config import TYPE_KEY, lost_fields
from tinker_cookbook.run.paths import CONFIG_HISTORY_FILE, local_path
from tinker_cookbook.run.weights_paths import resolve_weights
from tinker_cookbook.utils.command_line.config_file import CONFIG, program_of
from tinker_cookbook.utils.command_line.entrypoint import program_takes
from tinker_cookbook.utils.command_line.programs import program_command, started_as

_BEHAVIOR = "behavior_if_log_dir_exists="


def continue_command(log_path: str) -> str | None:
    """Returns the command line that resumes this run; None for a script."""
    words = _program_without(_BEHAVIOR, "log_path=")
    if words is None:
        return None
    words.append(f"log_path={log_path}")
    # The library's loops have no such option: they always resume the run in log_path.
    if program_takes(_BEHAVIOR.rstrip("=")):
        words.append(f"{_BEHAVIOR}resume")
    return shlex.join(words)


def repeat_line(log_path: str, recorded: Any) -> str | None:
    """Returns a line with the command that runs a recorded configuration again.

    ``None`` if one file is not the whole run: its settings changed at a step, or a script passed
    data, or classes of its own.
    """
    program = program_of(str(recorded.get(TYPE_KEY)))
    if (local_path(log_path) / CONFIG_HISTORY_FILE).exists():
        return None
    if program is None or lost_fields(recorded) or '"__main__:' in json.dumps(recorded):
        return None
    again = f"log_path={log_path.rstrip('/')}-again"
    return f"repeat       {program_command(program, f'{CONFIG}={log_path}', again)}"


def own_evaluation(log_path: str, state_path: str | None) -> str | None:
    """Returns a line with the command that evaluates saved weights on the run's held-out data."""
    keys = ("max_steps=", "load_checkpoint_path=", "log_path=")
    words = _program_without(_BEHAVIOR, *keys)
    if words is None or state_path is None or not all(program_takes(k[:-1]) for k in keys):
        return None
    values = ("0", state_path, f"{log_path.rstrip('/')}-eval")
    words += [f"{key}{value}" for key, value in zip(keys, values, strict=True)]
    return f"evaluate     {shlex.join(words)}"


def _program_without(*keys: str) -> list[str] | None:
    """Returns the words of the running command without these keys; None for a script."""
    started = started_as()
    if started is None:
        return None
    words, given = started
    return words + [w for w in given if not w.removeprefix("--").startswith(keys)]


def plot_command(log_path: str) -> str:
    """Returns the command line that plots the curves of a run."""
    return program_command("tinker_cookbook.plot", f"log_path={Path(log_path)}")


def use_lines(settings: Any, sampler_path: str) -> list[str]:
    """Returns the commands that use, evaluate and export the weights of a finished run.

    ``settings`` has ``log_path``, ``model_name``, ``backend``, ``base_url``, ``device``, ``dtype``,
    ``base_dtype`` and ``train_unembed``; ``sampler_path`` is ``tinker://RUN/sampler_weights/NAME``.
    """
    try:
        kind, url, _ = check_backend(
            settings.backend, settings.base_url, settings.device, settings.dtype
        )
    except TinkerCookbookError:  # the API key is no longer set
        return []
    local = kind == "local"
    weights = settings.log_path
    # Easier to read than the path, if it names the same weights.
    if resolve_weights(weights, "sampler_weights", "log_path") != sampler_path:
        weights = sampler_path
    chat = [f"model_path={weights}"]
    # Only settings that differ from the chat's defaults.
    defaults = {"backend": "auto", "base_url": None, "device": "auto", "dtype": "auto"}
    defaults |= {"base_dtype": "auto"}
    for name, default in defaults.items():
        if (value := getattr(settings, name, default)) != default:
            chat.append(f"{name}={value}")
    # The same settings, because the command also opens a model. A run without held-out data may
    # have any task, so the questions are the user's own.
    evaluation = program_command("tinker_cookbook.eval", *chat, "tasks=FILE.jsonl")
    lines = [
        f"talk to it   {program_command('tinker_cookbook.chat', *chat)}",
        f'evaluate     {evaluation}  # your rows {{"question": "…", "answer": "…"}}',
    ]
    # A local run has no server, so a command starts one.
    if local:
        url = "http://127.0.0.1:8000"
        serve = program_command("tinker_cookbook.server", f"model_name={settings.model_name}")
        lines.append(f"serve        {serve}")
    if url is not None:
        address = url.rstrip("/") + "/oai/api/v1"
        lines.append(f"OpenAI's API base_url={address} model={sampler_path}")
    where = [word for word in chat if word.startswith(("backend=", "base_url="))]
    exports = [("export", "my-adapter"), ("merge", "my-model")]
    # Weights that were all trained are no adapter.
    for action, out in exports[getattr(settings, "lora_rank", None) == 0 :]:
        words = (action, weights, f"out={out}", *where)
        lines.append(f"{action:<13}{program_command('tinker_cookbook.weights', *words)}")
    return lines
