"""Checks of settings such as ``device``, ``dtype`` and ``base_dtype`` without importing torch.

``devices`` checks at the start of the engine whether the machine has the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tinker_cookbook.exceptions import ConfigurationError, nearest

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NF4_BLOCK = 64
"""Weights that share a scale in ``nf4``."""

BITS = {"nf4": 4 + 32 / NF4_BLOCK, "int8": 8.0}
"""Bits per weight of a quantised base model, including its share of the scales."""


def _one_of(setting: str, value: object, names: Iterable[str]) -> str:
    requested = str(value).strip().lower()
    if requested not in names:
        raise ConfigurationError(
            f"{setting}: got {requested!r}, expected {', '.join(names)}{nearest(requested, names)}"
        )
    return requested


def check_device_name(device: str) -> str:
    """Returns ``auto``, ``cuda``, ``cuda:N``, ``mps`` or ``cpu``, in lower case."""
    requested = device.strip().lower()
    if not re.fullmatch(r"auto|cuda(:\d+)?|mps|cpu", requested):
        raise ConfigurationError(
            f"device: got {requested!r}, expected auto, cuda, cuda:N, mps or cpu"
        )
    return requested


def check_dtype_name(dtype: str) -> str:
    """Returns ``auto`` or torch's name of the dtype."""
    return _one_of("dtype", _SHORT.get(dtype.strip().lower(), dtype), _DTYPES)


def check_joint_training(joint_training: str | bool) -> str:
    """Returns ``auto``, ``true`` or ``false``."""
    return _one_of("joint_training", joint_training, ("auto", "true", "false"))


def check_base_dtype_name(base_dtype: str) -> str:
    """Returns ``auto``, ``nf4`` or ``int8``."""
    return _one_of("base_dtype", base_dtype, ("auto", *BITS))
