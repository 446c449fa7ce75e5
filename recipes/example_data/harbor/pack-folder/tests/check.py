"""Grades /app."""

import tarfile
from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


try:
    with tarfile.open(APP / "project.tar.gz", "r:gz") as archive:
        members = {m.name.removeprefix("./").rstrip("/"): m for m in archive.getmembers()}
except (OSError, tarfile.TarError):
    members = {}
files = {name for name, member in members.items() if member.isfile()}
run = members.get("project/run.sh")
whole = {str(p.relative_to(APP)) for p in (APP / "project").rglob("*") if p.is_file()}
score(
    files == {"project/main.py", "project/run.sh", "project/src/a.py"}
    and run is not None and run.mode & 0o100 and len(whole) == 6
)
