"""Names of checkpoints: ``tinker://RUN/weights/NAME`` and ``tinker://RUN/sampler_weights/NAME``.

Run ids and checkpoint names become folder names, so both may only have characters that every file
system accepts and that cannot leave the store's folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from tinker_cookbook.exceptions import CheckpointError

Kind = Literal["weights", "sampler_weights", "external_weights"]
"""``weights`` continue training (adapter, optimizer, step); ``sampler_weights`` only sample."""

KINDS: tuple[Kind, ...] = get_args(Kind)

SCHEME = "tinker://"

# No leading dot: the store keeps its own temporary folders under dotted names.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=@+-]{0,127}")


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
                "save_weights_for_sampler return such paths; checkpoints.jsonl in the run's "
                "log_path lists them."
            )
        parts = path.removeprefix(SCHEME).split("/")
        if len(parts) != 3 or parts[1] not in KINDS:
            raise CheckpointError(f"checkpoint path: got {path!r}, expected {expected}")
        return cls(run_id=parts[0], kind=cast("Kind", parts[1]), name=parts[2])


def check_name(name: str, field: str) -> None:
    """Raises ``CheckpointError`` unless ``name`` can safely be a folder of the store."""
    if not is_safe_name(name):
        raise CheckpointError(
            f"{field}: got {name!r}, expected 1 to 128 of the characters A-Z a-z 0-9 _ . : = @ + - "
            "with a letter, digit or _ first. Choose a name like 'step-000100'."
        )


def is_safe_name(name: str) -> bool:
    """Returns whether ``check_name`` accepts the name."""
    return _SAFE_NAME.fullmatch(name) is not None
