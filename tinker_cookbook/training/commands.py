"""Command lines to continue a run, to plot it, and to use its weights."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.utils.command_line.entrypoint import program_takes

_BEHAVIOR = "behavior_if_log_dir_exists="


def continue_command(log_path: str) -> str | None:
    """Returns the command line that resumes this run; None unless it was started with ``-m``."""
    program = list(getattr(sys, "orig_argv", sys.argv))
    if "-m" not in program:
        return None
    # Use the same interpreter: another "python" may not have the package.
    at = program.index("-m") + 2
    words, given = program[:at], program[at:]
    # Both keys are set below.
    words += [w for w in given if not w.removeprefix("--").startswith((_BEHAVIOR, "log_path="))]
    words.append(f"log_path={log_path}")
    # The library's loops have no such option: they always resume the run in log_path.
    if program_takes(_BEHAVIOR.rstrip("=")):
        words.append(f"{_BEHAVIOR}resume")
    return shlex.join(words)


def plot_command(log_path: str) -> str:
    """Returns the command line that plots the curves of a run."""
    python = getattr(sys, "orig_argv", ["python"])[0]
    return shlex.join([python, "-m", "tinker_cookbook.plot", f"log_path={Path(log_path)}"])


def use_lines(settings: Any, sampler_path: str) -> list[str]:
    """Returns the commands that use, evaluate and export the weights of a finished run.

    ``settings`` has ``model_name``, ``backend``, ``base_url``, ``device``, ``dtype``,
    ``base_dtype`` and ``train_unembed``; ``sampler_path`` is ``tinker://RUN/sampler_weights/NAME``.
    """
    try:
        kind, url, _ = check_backend(
            settings.backend, settings.base_url, settings.device, settings.dtype
        )
    except TinkerCookbookError:  # the API key is no longer set
        return []
    local = kind == "local"
    python = getattr(sys, "orig_argv", ["python"])[0]
    chat = [python, "-m", "tinker_cookbook.chat", f"model_path={sampler_path}"]
    # Only settings that differ from the chat's defaults.
    defaults = {"backend": "auto", "base_url": None, "device": "auto", "dtype": "auto"}
    defaults |= {"base_dtype": "auto"}
    for name, default in defaults.items():
        if (value := getattr(settings, name, default)) != default:
            chat.append(f"{name}={value}")
    # The same settings, because the command also opens a model.
    evaluation = [python, "-m", "tinker_cookbook.eval", *chat[3:], "tasks=gsm8k", "limit=200"]
    lines = [f"talk to it   {shlex.join(chat)}", f"evaluate     {shlex.join(evaluation)}"]
    # A local run has no server, so a command starts one.
    if local:
        url = "http://127.0.0.1:8000"
        serve = [python, "-m", "tinker_cookbook.server", f"model_name={settings.model_name}"]
        lines.append(f"serve        {shlex.join(serve)}")
    if url is not None:
        address = url.rstrip("/") + "/oai/api/v1"
        lines.append(f"OpenAI's API base_url={address} model={sampler_path}")
    where = [word for word in chat if word.startswith(("backend=", "base_url="))]
    weights = [python, "-m", "tinker_cookbook.weights"]
    for name, out in (("export", "my-adapter"), ("merge", "my-model")):
        command = [*weights, name, sampler_path, f"out={out}", *where]
        lines.append(f"{name:<13}{shlex.join(command)}")
    return lines
