"""Images of a record: each is stored once, in a file that its digest names."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from tinker_cookbook.record.files import write_file
from tinker_cookbook.record.schema import FOLDER

_FOLDER = "images"
_FORMATS = ("png", "jpeg")
"""Those of the SDK."""
_DIGEST = re.compile("[0-9a-f]{64}")


class ImageFiles:
    """Images of the record in ``log_path``; ``None``: only their digests are recorded."""

    def __init__(self, log_path: Path | None = None) -> None:
        self._folder = None if log_path is None else log_path / FOLDER / _FOLDER
        self._stored: set[str] = set()

    def add(self, chunk: Any, offset: int) -> dict[str, Any]:
        """Returns the row of a chunk of the SDK without tokens, and stores its bytes.

        ``format`` is null for an image by location, whose bytes are not known.

        Raises:
            TrainingError: The file cannot be written.
        """
        data = getattr(chunk, "data", None)
        # Some clients have the bytes as text.
        source: Any = data or str(getattr(chunk, "location", ""))
        content = source.encode() if isinstance(source, str) else bytes(source)
        digest = hashlib.sha256(content).hexdigest()
        row = {"offset": offset, "length": chunk.length, "sha256": digest, "format": None}
        kind = getattr(chunk, "format", None)
        if data and kind and self._folder is not None:
            row["format"] = kind
            self._store(f"{digest}.{kind}", content)
        return row

    def _store(self, name: str, content: bytes) -> None:
        if self._folder is None or name in self._stored:
            return
        path = self._folder / name
        if not path.exists():
            write_file(path, content)
        self._stored.add(name)


def image_file(log_path: Path, image: dict[str, Any]) -> Path | None:
    """Returns the file of a row of the column ``images``; ``None`` if it is not stored."""
    # A record of another person must not name other files.
    if image["format"] not in _FORMATS or not _DIGEST.fullmatch(image["sha256"] or ""):
        return None
    return log_path / FOLDER / _FOLDER / f"{image['sha256']}.{image['format']}"
