"""Grades /app."""

import os
from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


TREE = APP / "tree"
found = {str(p.relative_to(TREE)) for p in TREE.rglob("*") if not str(p.relative_to(TREE)).startswith("folder-link/")}
links = {name for name in found if os.path.islink(TREE / name)}
gone = not ({"bad", "deep/er/bad", "deep/chain"} & found)
kept = {"good", "deep/good", "folder-link"} <= links and {"real.txt", "deep", "deep/er"} <= found
score(gone and kept)
