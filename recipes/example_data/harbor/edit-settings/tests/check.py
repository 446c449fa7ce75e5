"""Grades /app."""

import json
from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


try:
    found = json.loads(text_of("settings.json"))
except ValueError:
    found = {}
expected = {
    "server": {"host": "localhost", "port": 8080},
    "features": ["login", "export", "search"],
    "limits": {"upload_mb": 25, "users": None},
}
score(found == expected)
