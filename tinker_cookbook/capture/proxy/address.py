"""The address of a request: what its sample belongs to, as ``key/value`` pairs of the URL's path.

A program that only speaks a chat API cannot set a scope, but its base URL can be chosen:
``http://HOST:PORT/r/run/my-run/iter/3/group/0/traj/5``.
"""

from __future__ import annotations

ADDRESS_KEY_MAP: dict[str, str] = {
    "run": "run_id",
    "attempt": "run_attempt",
    "split": "split",
    "iter": "iteration",
    "group": "group_idx",
    "traj": "traj_idx",
    "purpose": "purpose",
}
"""Keys of scopes by their short names in addresses; other keys are used as they are."""

_INTEGERS = frozenset({"run_attempt", "iteration", "group_idx", "traj_idx"})


def parse_address(path: str) -> dict[str, str | int]:
    """Returns the pairs of a path such as ``run/my-run/iter/3``; empty segments are skipped.

    Attempt, iteration, group and trajectory become integers.

    Raises:
        ValueError: A key has no value, or a number is none or is out of range.
    """
    segments = [segment for segment in path.split("/") if segment]
    if len(segments) % 2:
        raise ValueError(
            f"address: got an odd number of segments in {path!r}, expected key/value pairs such as "
            "run/my-run/iter/3"
        )
    pairs: dict[str, str | int] = {}
    for name, text in zip(segments[::2], segments[1::2], strict=True):
        key = ADDRESS_KEY_MAP.get(name, name)
        pairs[key] = _integer(name, text) if key in _INTEGERS else text
    return pairs


def _integer(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"address: {name}: got {text!r}, expected an integer") from None
    # The store's columns have 32 bits, and one bad row would lose the others of its batch.
    if not -(2**31) <= number < 2**31:
        raise ValueError(f"address: {name}: {number} is out of range, expected 32 bits")
    return number
