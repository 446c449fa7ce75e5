"""Files of a checkpoint folder, and detection of damage.

==============================  ====================================================
``adapter_config.json``         PEFT's description of the adapter
``adapter_model.safetensors``   the adapter under PEFT's names
``optimizer.safetensors``       optimizer tensors (``weights`` only)
``state.json``                  step, RNG and other state of the engine, with size and
                                SHA-256 of the files above and of itself
``expires_at``                  seconds since the epoch; absent: never expires
==============================  ====================================================

``state.json`` is written last. Equal tensors give equal bytes: resuming is compared bit for bit.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from tinker_cookbook.exceptions import CheckpointError

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
EXPIRES_AT = "expires_at"

_FORMAT = 1


@dataclass(frozen=True)
class FileSeal:
    """Size and SHA-256 of a file as it was written."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> FileSeal:
        """Seals ``content``."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class StateFile:
    """The content of ``state.json``."""

    state: dict[str, Any]
    user_metadata: dict[str, str]
    created_at: float
    """Seconds since the epoch."""
    seals: dict[str, FileSeal]

    @property
    def size_bytes(self) -> int:
        """Bytes of the sealed files together."""
        return sum(seal.size_bytes for seal in self.seals.values())


def encode_json(value: Mapping[str, Any], field: str, indent: int | None = None) -> bytes:
    """JSON with sorted keys; raises ``CheckpointError`` for what JSON cannot hold."""
    try:
        return json.dumps(value, indent=indent, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{field}: {error}; expected str, int, float, bool, None, lists and dicts of them"
        ) from error


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns the safetensors file of ``tensors``: the same names and values give the same
    bytes."""
    separate: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # The format knows no shared storage, and safetensors refuses it rather than copy.
        separate[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return safetensors.torch.save(separate, metadata={"format": "pt"})


def encode_checkpoint(
    contents: Mapping[str, Callable[[], bytes]],
    state: Mapping[str, Any],
    user_metadata: Mapping[str, str],
    created_at: float,
) -> Iterator[tuple[str, bytes]]:
    """Yields ``(name, content)`` of each file, ``state.json`` last.

    Contents are generated one by one, so the bytes of a large optimizer state and of the adapter
    are never in memory together.
    """
    seals: dict[str, dict[str, Any]] = {}
    for name, make in contents.items():
        content = make()
        seals[name] = vars(FileSeal.of(content))
        yield name, content
    # Through JSON once, so that the checksum is of what a reader will have (keys are strings).
    body = json.loads(
        encode_json(
            {
                "format": _FORMAT,
                "created_at": created_at,
                "user_metadata": dict(user_metadata),
                "files": seals,
                "state": dict(state),
            },
            "state",
        )
    )
    yield STATE, encode_json({**body, "checksum": _checksum(body)}, "state")


def read_state(folder: Path) -> StateFile:
    """Reads and checks ``state.json``; raises ``CheckpointError`` when it is damaged."""
    path = folder / STATE
    try:
        body = json.loads(path.read_bytes())
        checksum = body.pop("checksum")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: got {_size_of(path)} bytes that are no whole state file ({error})"
        ) from error
    if body.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path}: got format {body.get('format')!r}, expected {_FORMAT}; it was written by "
            "another version of this package"
        )
    if checksum != _checksum(body):
        raise CheckpointError(f"{path}: checksum differs; the file was changed or is damaged")
    return StateFile(
        state=body["state"],
        user_metadata=body["user_metadata"],
        created_at=body["created_at"],
        seals={name: FileSeal(**seal) for name, seal in body["files"].items()},
    )


def check_sizes(folder: Path, state: StateFile) -> None:
    """Raises ``CheckpointError`` if a file is missing or has another size than when written."""
    for name, seal in state.seals.items():
        _check_size(folder / name, seal)


def read_sealed(folder: Path, name: str, state: StateFile) -> bytes:
    """Returns a file's content; raises ``CheckpointError`` if its checksum differs."""
    path, seal = folder / name, state.seals[name]
    _check_size(path, seal)
    content = path.read_bytes()
    if FileSeal.of(content) != seal:
        raise CheckpointError(
            f"{path}: got {len(content)} of {seal.size_bytes} bytes, but their SHA-256 is not the "
            "one that was written; the file is damaged"
        )
    return content


def decode_tensors(content: bytes) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file as copies on the CPU."""
    return safetensors.torch.load(content)


def read_peft_files(folder: Path) -> list[tuple[str, bytes]]:
    """Returns ``(name, content)`` of the files that ``PeftModel.from_pretrained`` needs."""
    state = read_state(folder)
    return [(name, read_sealed(folder, name, state)) for name in (ADAPTER_CONFIG, ADAPTER)]


def tar(content: Iterable[tuple[str, bytes]]) -> bytes:
    """Returns an uncompressed tar file (weights do not compress); equal content gives equal
    bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in content:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def deadline(now: float, ttl_seconds: int | None) -> float | None:
    """Returns the expiry time for a time to live; ``None``: never."""
    if ttl_seconds is None:
        return None
    if isinstance(ttl_seconds, bool) or ttl_seconds <= 0:
        raise CheckpointError(
            f"ttl_seconds: got {ttl_seconds!r}, expected a positive number of seconds, or None to "
            "keep the checkpoint for good"
        )
    return now + ttl_seconds


def encode_expiry(expires_at: float | None) -> list[tuple[str, bytes]]:
    """Returns the content of ``expires_at``."""
    # Beside state.json, not in it: the TTL may change and what was saved may not.
    return [] if expires_at is None else [(EXPIRES_AT, repr(float(expires_at)).encode())]


def read_expiry(folder: Path) -> float | None:
    """Returns the expiry time in seconds since the epoch; ``None``: never."""
    try:
        return float((folder / EXPIRES_AT).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        logger.warning("%s is damaged; the checkpoint is kept for good", folder / EXPIRES_AT)
        return None


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode_json(body, "state")).hexdigest()


def _check_size(path: Path, seal: FileSeal) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: the file is missing, expected {seal.size_bytes} bytes")
    if _size_of(path) != seal.size_bytes:
        raise CheckpointError(
            f"{path}: got {_size_of(path)} bytes, expected {seal.size_bytes}; the file is cut off "
            "or was changed"
        )


def _size_of(path: Path) -> int:
    return path.stat().st_size
