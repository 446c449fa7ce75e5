"""The commands a person types next: to continue a run, to plot it, and to use what it made."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.utils.command_line.entrypoint import program_takes

_OPENAI_PATH = "/oai/api/v1"
_BEHAVIOR = "behavior_if_log_dir_exists="


def continue_command(log_path: str) -> str | None:
    """Returns the command line that continues this run, or ``None`` where no recipe was started."""
    program = list(getattr(sys, "orig_argv", sys.argv))
    if "-m" not in program:
        return None
    at = program.index("-m")
    # The interpreter as it was called: another "python" may not have the package.
    words = program[: at + 2]
    given = program[at + 2 :]
    words += [w for w in given if not w.removeprefix("--").startswith((_BEHAVIOR, "log_path="))]
    words.append(f"log_path={log_path}")
    # The loops of the library continue the run in log_path without being asked.
    if program_takes(_BEHAVIOR.rstrip("=")):
        words.append(f"{_BEHAVIOR}resume")
    return shlex.join(words)


def plot_command(log_path: str) -> str:
    """Returns the command line that draws the curves of a run."""
    python = getattr(sys, "orig_argv", ["python"])[0]
    return shlex.join([python, "-m", "tinker_cookbook.plot", f"log_path={Path(log_path)}"])


def use_lines(settings: Any, sampler_path: str) -> list[str]:
    """Returns the commands that use, evaluate and export the weights of a finished run.

    Args:
        settings: Has ``model_name``, ``backend``, ``base_url``, ``device``, ``dtype`` and
            ``train_unembed``.
        sampler_path: ``tinker://RUN/sampler_weights/NAME``.
    """
    try:
        kind, url, _ = check_backend(
            settings.backend, settings.base_url, settings.device, settings.dtype
        )
    except TinkerCookbookError:  # the key is gone since the run began
        return []
    local = kind == "local"
    python = getattr(sys, "orig_argv", ["python"])[0]
    lines: list[str] = []
    if local:
        serve = [python, "-m", "tinker_cookbook.server", f"model_name={settings.model_name}"]
        lines.append(f"serve        {shlex.join(serve)}")
    address = "http://127.0.0.1:8000" if local else url
    if address is not None:
        address = address.rstrip("/") + _OPENAI_PATH
        lines += [
            f"talk to it   {_curl(address, sampler_path)}",
            f"evaluate     any program for OpenAI's API: base_url={address} model={sampler_path}",
        ]
    lines.append(f"export       {_export(python, sampler_path, local)}")
    if local:
        # Not at the top: it would load the engine for runs on a server.
        from tinker_cookbook.engine.model.merging import merge_note

        if note := merge_note(settings.model_name, settings.train_unembed):
            lines.append(f"             {note}")
    return lines


def _curl(address: str, sampler_path: str) -> str:
    body = {"model": sampler_path, "messages": [{"role": "user", "content": "Hi"}]}
    # The key stays a variable, so that neither the terminal nor a log shows it.
    return (
        f'curl {address}/chat/completions -H "Authorization: Bearer $TINKER_API_KEY" '
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def _export(python: str, sampler_path: str, local: bool) -> str:
    """Returns the command that writes the adapter in PEFT's format into a folder."""
    if not local:
        return shlex.join(["tinker", "checkpoint", "download", sampler_path, "-o", "my-adapter"])
    program = (
        "from tinker_cookbook.backends import connect; "
        'connect("local").service.create_rest_client()'
        f'.copy_out("{sampler_path}", "my-adapter").result()'
    )
    return f"{python} -c {shlex.quote(program)}"
