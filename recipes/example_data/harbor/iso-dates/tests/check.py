"""Grades /app."""

from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


expected = [
    "2026-03-07 opening",
    "2025-12-24 party, again on 2026-01-01",
    "version 1.2 released on 2024-11-30 (build 1.2.3)",
    "no date here",
]
score(text_of("events.txt").splitlines() == expected)
