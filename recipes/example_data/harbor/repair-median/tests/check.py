"""Grades /app."""

import json
import subprocess
from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


# The repaired file runs in another process, which answers in JSON.
PROGRAM = """
import json, sys
sys.path.insert(0, "/app")
import stats
values = [3, 1, 2]
found = [stats.median(v) for v in ([5], [1, 2], [4, 1, 3, 2], [9, 7, 8])]
stats.median(values)
try:
    stats.median([])
    refused = False
except ValueError:
    refused = True
print(json.dumps([found, values, refused, stats.mean([1, 2])]))
"""
done = subprocess.run(
    ["python3", "-I", "-c", PROGRAM], capture_output=True, text=True, timeout=10, check=False
)
try:
    found, values, refused, mean = json.loads(done.stdout.splitlines()[-1])
except (IndexError, ValueError):
    found, values, refused, mean = None, None, False, None
score(found == [5, 1.5, 2.5, 8] and mean == 1.5, values == [3, 1, 2] and found is not None, refused)
