"""Grades /app."""

import collections
import re
import subprocess
from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


TEXT = "One fish, two fish: red FISH blue fish. Two birds - two 2 trees; a red bird's nest."


def printed(path, count):
    done = subprocess.run(
        ["python3", "-I", str(APP / "top_words.py"), str(path), str(count)],
        capture_output=True, text=True, timeout=10, check=False,
    )
    return done.stdout.splitlines()


def expected(text, count):
    counts = collections.Counter(re.findall("[a-z]+", text.lower()))
    best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [f"{word} {number}" for word, number in best]


hidden = Path("/tmp/hidden.txt")
hidden.write_text(TEXT)
example = (APP / "example.txt").read_text()
score(
    printed(APP / "example.txt", 3) == expected(example, 3),
    printed(hidden, 4) == expected(TEXT, 4) and printed(hidden, 100) == expected(TEXT, 100),
)
