"""Grades /app."""

from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


lines = (APP / "addresses.txt").read_text().splitlines()
expected = sorted({line.strip().lower() for line in lines if line.strip()})
score(text_of("unique.txt") == "".join(f"{line}\n" for line in expected))
