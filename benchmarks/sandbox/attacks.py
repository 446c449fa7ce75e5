"""Programs that do not solve their problem and try to be scored as if they did, or to do harm.

Each of ``attacks.txt`` defines ``solve(x)``, or reads stdin, and knows nothing of the tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ATTACKS", "CALL_TESTS", "RIGHT_CALLS", "RIGHT_STDIO", "STDIN", "STDOUT", "Attack"]

CALL_TESTS = (
    "assert solve(2) == 7919",
    "assert solve(3) == 104729",
    "assert solve(11) == [31, 'x', (5, None)]",
)
STDIN, STDOUT = "12\n", "7919 104729\n"
RIGHT_CALLS = "def solve(x): return {2: 7919, 3: 104729, 11: [31, 'x', (5, None)]}[x]"
RIGHT_STDIO = "print(7919, 104729)"


@dataclass(frozen=True)
class Attack:
    """A program that must score 0."""

    name: str
    group: str
    code: str
    slow: bool
    """Whether it runs until a time limit ends it."""

    @property
    def stdio(self) -> bool:
        """Whether its problem is one of input and output."""
        return self.group == "stdio"


def _read() -> list[Attack]:
    text = (Path(__file__).parent / "attacks.txt").read_text(encoding="utf-8")
    pieces, *programs = text.split("\n### ")
    found = re.findall(r"=== (\w+)\n(.*?)(?=\n===|\Z)", pieces, re.DOTALL)
    common = {name: code.strip() for name, code in found}
    attacks = []
    for program in programs:
        title, _, code = program.partition("\n")
        for name, piece in common.items():
            code = re.sub(rf"^{name}$", lambda _, piece=piece: piece, code, flags=re.MULTILINE)
        group, _, name = title.partition(": ")
        attacks.append(Attack(name.removesuffix(" (slow)"), group, code, name.endswith(" (slow)")))
    return attacks


ATTACKS = _read()
