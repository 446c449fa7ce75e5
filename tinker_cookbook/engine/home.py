"""Folders in which the engine keeps checkpoints, converted models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def home_dir() -> Path:
    """Returns ``TINKER_COOKBOOK_HOME``, else ``~/.tinker_cookbook``."""
    return Path(os.environ.get("TINKER_COOKBOOK_HOME") or "~/.tinker_cookbook").expanduser()


def models_dir() -> Path:
    """Returns ``TINKER_COOKBOOK_MODELS``, else ``home_dir()/models``, for converted models."""
    chosen = os.environ.get("TINKER_COOKBOOK_MODELS")
    return Path(chosen).expanduser() if chosen else home_dir() / "models"
