"""Names of checkpoints, files of a checkpoint folder, and detection of damage.

==============================  ====================================================
``adapter_config.json``         PEFT's description of the adapter
``adapter_model.safetensors``   the adapter under PEFT's names
``optimizer.safetensors``       optimizer tensors (``weights`` only)
``state.json``                  step, RNG and other state of the engine, with size and
                                SHA-256 of the files above and of itself
``expires_at``                  seconds since the epoch; absent: never expires
``public``                      empty; present: published for all owners of a server
==============================  ====================================================

``state.json`` is written last. Equal tensors give equal bytes: resuming is compared bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast, get_args

import safetensors
import safetensors.torch
from torch import Tensor

from tinker_cookbook.exceptions import CheckpointError

logger = logging.getLogger(__name__)

Kind = Literal["weights", "sampler_weights", "external_weights"]
"""``weights`` continue training (adapter, optimizer, step); ``sampler_weights`` only sample."""

KINDS: tuple[Kind, ...] = get_args(Kind)
SCHEME = "tinker://"

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
BASE_DIGEST = "base_model_digest"
"""Key in the header of an adapter's file: ``weights_digest`` of the base model in training."""
EXPIRES_AT = "expires_at"
PUBLIC = "public"

MAX_TTL_SECONDS = 100 * 365 * 24 * 3600
"""A hundred years; dates after the year 9999 cannot be represented."""

_FORMAT = 1

# Names become folders: allow only characters that every file system accepts and that cannot leave
# the store. No leading dot, because temporary folders of the store start with a dot.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=@+-]{0,127}")


def is_safe_name(name: str) -> bool:
    """Returns whether ``check_name`` accepts the name."""
    return _SAFE_NAME.fullmatch(name) is not None


def check_name(name: str, field: str) -> None:
    """Raises ``CheckpointError`` unless ``name`` is safe as a folder of the store."""
    if not is_safe_name(name):
        raise CheckpointError(
            f"{field}: got {name!r}, expected 1 to 128 of the characters A-Z a-z 0-9 _ . : = @ + - "
            "with a letter, digit or _ first. Choose a name like 'step-000100'."
        )


@dataclass(frozen=True)
class TinkerPath:
    """The three parts of a checkpoint's path."""

    run_id: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        check_name(self.run_id, "run id")
        check_name(self.name, "checkpoint name")
        if self.kind not in KINDS:
            raise CheckpointError(f"checkpoint kind: got {self.kind!r}, expected one of {KINDS}")

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, path: str) -> TinkerPath:
        """Parses a path; raises ``CheckpointError`` with the invalid part."""
        expected = f"{SCHEME}RUN/weights/NAME or {SCHEME}RUN/sampler_weights/NAME"
        if not path.startswith(SCHEME):
            raise CheckpointError(
                f"checkpoint path: got {path!r}, expected {expected}. save_state and "
                "save_weights_for_sampler return such paths; of the run in LOG_PATH, "
                "tinker_cookbook.checkpoint_utils.get_last_checkpoint(LOG_PATH).sampler_path is "
                "the newest, and LOG_PATH/checkpoints.jsonl lists all"
            )
        parts = path.removeprefix(SCHEME).split("/")
        if len(parts) != 3 or parts[1] not in KINDS:
            raise CheckpointError(f"checkpoint path: got {path!r}, expected {expected}")
        return cls(run_id=parts[0], kind=cast("Kind", parts[1]), name=parts[2])


@dataclass(frozen=True)
class StateFile:
    """The content of ``state.json``; ``created_at`` in seconds since the epoch, ``files`` with the
    size and SHA-256 of each when it was written."""

    state: dict[str, Any]
    user_metadata: dict[str, str]
    created_at: float
    files: dict[str, dict[str, Any]]

    def check_size(self, path: Path) -> None:
        """Raises ``CheckpointError`` if a file is missing or has another size than when written."""
        expected = self.files[path.name]["size_bytes"]
        if not path.is_file():
            raise CheckpointError(f"{path}: the file is missing, expected {expected} bytes")
        if (size := path.stat().st_size) != expected:
            raise CheckpointError(
                f"{path}: got {size} bytes, expected {expected}; the file is cut off or was changed"
            )


def encode_json(value: Mapping[str, Any], field: str, indent: int | None = None) -> bytes:
    """Encodes JSON with sorted keys; raises ``CheckpointError`` for values that JSON does not
    have."""
    try:
        # Sorted keys: equal values give equal bytes, which the checksum relies on.
        return json.dumps(value, indent=indent, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{field}: {error}; expected str, int, float, bool, None, lists and dicts of them"
        ) from error


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises ``CheckpointError`` for a lone surrogate, which a response cannot contain."""
    try:
        "".join(map(str, chain.from_iterable(metadata.items()))).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"user_metadata: {error}; expected Unicode text") from error


def encode_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns the safetensors file of ``tensors`` with ``metadata`` in its header: the same names
    and values give the same bytes."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name in sorted(tensors):
        # Sorted by name: the order of the tensors must not change the bytes.
        tensor = tensors[name].detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # Copy the tensors, because safetensors raises an error for shared storage.
        separate[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    content = safetensors.torch.save(separate, metadata={"format": "pt", **(metadata or {})})
    if not metadata:
        return content
    # The library writes several metadata in a random order.
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(content)[end:]])


def header_metadata(content: bytes) -> dict[str, str]:
    """Returns the ``metadata`` of ``encode_tensors``; programs other than this package write
    none."""
    length = int.from_bytes(content[:8], "little")
    found = dict(json.loads(content[8 : 8 + length]).get("__metadata__") or {})
    found.pop("format", None)
    return found


def encode_checkpoint(
    contents: Mapping[str, Callable[[], bytes]],
    state: Mapping[str, Any],
    user_metadata: Mapping[str, str],
    created_at: float,
) -> Iterator[tuple[str, bytes]]:
    """Yields ``(name, content)`` of each file, ``state.json`` last."""
    check_metadata(user_metadata)
    # One file at a time, so that adapter and optimizer are never in memory together as bytes.
    files: dict[str, dict[str, Any]] = {}
    for name, make in contents.items():
        content = make()
        files[name] = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        yield name, content
    body = {
        "format": _FORMAT,
        "created_at": created_at,
        "user_metadata": dict(user_metadata),
        "files": files,
        "state": dict(state),
    }
    # Convert through JSON once, so that the checksum covers what a reader sees (string keys).
    body = json.loads(encode_json(body, "state"))
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
            f"{path}: got {path.stat().st_size} bytes, not a complete state file ({error})"
        ) from error
    # Before the checksum, which another version may compute differently.
    if (written := body.pop("format", None)) != _FORMAT:
        raise CheckpointError(
            f"{path}: got format {written!r}, expected {_FORMAT}; it was written by another "
            "version of this package"
        )
    # ``state.json`` has the checksums of the other files, so it must also have its own.
    if checksum != _checksum({"format": written, **body}):
        raise CheckpointError(f"{path}: checksum differs; the file was changed or is damaged")
    return StateFile(**body)


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode_json(body, "state")).hexdigest()


def read_sealed(folder: Path, name: str, state: StateFile) -> bytes:
    """Returns a file's content; raises ``CheckpointError`` if its checksum differs."""
    path = folder / name
    # Check the size first: a truncated file is reported with both sizes and is not read.
    state.check_size(path)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != state.files[name]["sha256"]:
        raise CheckpointError(
            f"{path}: the SHA-256 of its {len(content)} bytes differs from the written one; the "
            "file is damaged"
        )
    return content


def read_tensors(folder: Path, name: str, state: StateFile) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, checked as in ``read_sealed``, on the CPU."""
    return safetensors.torch.load(read_sealed(folder, name, state))


def expiry_file(now: float, ttl_seconds: int | None) -> dict[str, bytes]:
    """Returns ``expires_at`` for a time to live; empty for ``None`` (never)."""
    # A separate file, because the TTL may change but ``state.json`` must not.
    if ttl_seconds is None:
        return {}
    # ``True`` is an int in Python and would expire the checkpoint after a second.
    if isinstance(ttl_seconds, bool) or not 0 < ttl_seconds <= MAX_TTL_SECONDS:
        raise CheckpointError(
            f"ttl_seconds: got {ttl_seconds!r}, expected a number of seconds above 0 and at most "
            f"{MAX_TTL_SECONDS} (100 years), or None to keep the checkpoint for good"
        )
    return {EXPIRES_AT: repr(float(now + ttl_seconds)).encode()}


def read_expiry(folder: Path) -> float | None:
    """Returns the expiry time in seconds since the epoch; ``None``: never."""
    try:
        return float((folder / EXPIRES_AT).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        # Keeping a checkpoint too long is better than deleting it.
        logger.warning("%s is damaged; the checkpoint is kept permanently", folder / EXPIRES_AT)
        return None
