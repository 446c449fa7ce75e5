"""Grades /app."""

from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


lines = [line for path in sorted((APP / "logs").glob("*.log")) for line in path.read_text().splitlines()]
expected = sum(line.split()[1:2] == ["ERROR"] for line in lines)
score(text_of("errors.txt").strip() == str(expected) and expected > 10)
