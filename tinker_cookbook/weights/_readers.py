"""Runs a program that loads an export, in a separate process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import WeightsError


def run_reader(
    script: str,
    request: Mapping[str, Any],
    *,
    program: str,
    error_lines: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs ``script request.json answer.json`` in a new process and returns the answer.

    The script imports no other file of this package. ``program`` is its name for errors, which
    quote the output lines that match ``error_lines``; ``python`` is the interpreter.

    Raises:
        WeightsError: The program ends without an answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            # Isolated mode: modules of this folder would shadow packages such as gguf.
            [python, "-I", script, str(asked), str(answer)],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(env or {})},
            check=False,
        )
        if done.returncode != 0 or not answer.is_file():
            lines = (done.stdout + done.stderr).strip().splitlines()
            # A Python traceback may follow the error lines.
            message = [line for line in lines if re.search(error_lines, line)][:4] or lines[-4:]
            raise WeightsError(
                f"{Path(request['model']).name}: {program} ended with code {done.returncode}; "
                "nothing was written. Its message:\n" + "\n".join(message)
            )
        return json.loads(answer.read_text(encoding="utf-8"))
