"""Checks of settings such as ``device``, ``dtype`` and ``base_dtype`` without importing torch.

``devices`` checks at the start of the engine whether the machine has the device.
"""

from __future__ import annotations

from tinker_cookbook.exceptions import ConfigurationError, nearest

DEVICE_TYPES = ("cuda", "mps", "cpu")
DTYPE_NAMES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
NF4_BLOCK = 64
"""Weights that share a scale in ``nf4``."""

BITS = {"nf4": 4 + 32 / NF4_BLOCK, "int8": 8.0}
"""Bits per weight of a quantised base model, including its share of the scales."""

BASE_DTYPE_NAMES = ("auto", *BITS)


def check_device_name(device: str) -> str:
    """Returns ``auto``, ``cuda``, ``cuda:N``, ``mps`` or ``cpu``, in lower case.

    ``mps:0`` is ``mps`` and ``cpu:0`` is ``cpu``; other indices are refused.
    """
    requested = device.strip().lower()
    kind, _, index = requested.partition(":")
    if requested != "auto" and (kind not in DEVICE_TYPES or (index and not index.isdigit())):
        raise ConfigurationError(
            f"device: got {requested!r}, expected auto, cuda, cuda:N, mps or cpu"
            + nearest(kind, DEVICE_TYPES)
        )
    if kind in ("mps", "cpu") and index:
        if int(index):
            raise ConfigurationError(
                f"device: got {requested!r}, but there is one {kind} device; set device={kind}"
            )
        return kind
    return requested


def check_dtype_name(dtype: str) -> str:
    """Returns ``auto`` or torch's name of the dtype."""
    requested = dtype.strip().lower()
    if requested != "auto" and requested not in DTYPE_NAMES:
        raise ConfigurationError(
            f"dtype: got {requested!r}, expected auto, float32, bfloat16 or float16"
            + nearest(requested, DTYPE_NAMES)
        )
    return DTYPE_NAMES.get(requested, requested)


def check_joint_training(joint_training: str | bool) -> str:
    """Returns ``auto``, ``true`` or ``false``."""
    requested = str(joint_training).strip().lower()
    if requested not in ("auto", "true", "false"):
        raise ConfigurationError(f"joint_training: got {requested!r}, expected auto, true or false")
    return requested


def check_base_dtype_name(base_dtype: str) -> str:
    """Returns ``auto``, ``nf4`` or ``int8``."""
    requested = base_dtype.strip().lower()
    if requested not in BASE_DTYPE_NAMES:
        raise ConfigurationError(
            f"base_dtype: got {requested!r}, expected auto, nf4 or int8"
            + nearest(requested, BASE_DTYPE_NAMES)
        )
    return requested
