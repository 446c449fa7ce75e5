"""Grades /app."""

from pathlib import Path

APP, REWARD = Path("/app"), Path("/logs/verifier/reward.txt")


def text_of(name):
    path = APP / name
    return path.read_text(errors="replace") if path.is_file() else ""


def score(*checks):
    REWARD.write_text(str(sum(map(bool, checks)) / len(checks)))


PHOTOS = APP / "photos"
files = {str(p.relative_to(PHOTOS)): p.read_text() for p in PHOTOS.rglob("*") if p.is_file()}
expected = {
    "one.jpg": "1\n",
    "two.jpg": "2\n",
    "trip/three three.jpg": "3\n",
    "trip/four.jpg": "4\n",
    "trip/notes.txt": "a jpeg\n",
    "trip/old/five.jpg": "5\n",
}
score(files == expected)
