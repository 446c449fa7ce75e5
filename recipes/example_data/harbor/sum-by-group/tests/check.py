"""Grades /app."""

import collections
import csv
from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


totals = collections.Counter()
for row in csv.DictReader((APP / "sales.csv").open()):
    totals[row["shop"]] += int(row["amount"])
lines = text_of("totals.csv").split()
score(lines[:1] == ["shop,total"], lines[1:] == [f"{shop},{totals[shop]}" for shop in sorted(totals)])
