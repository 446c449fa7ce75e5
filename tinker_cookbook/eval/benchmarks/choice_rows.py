"""Rows of multiple choice questions with options and images, as in MMMU."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.supervised.row_images import MARK, resolve_paths

_OPTIONS = ("options", "choices")
_MARK = re.compile(r"<image (\d+)>")
_INSTRUCTION = "Answer with the letter of the right option."
_LETTERS = string.ascii_uppercase[:10]


def choice_row(row: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Returns a row with its options in the question and a letter as answer, and the letters.

    Options are a list, or its text. Images in ``image_1`` … take the places of their marks. Raises
    RendererError for options or an answer that cannot be read.
    """
    column = next((name for name in _OPTIONS if row.get(name)), None)
    plain = {name: value for name, value in row.items() if name not in _OPTIONS}
    options: Any = [] if column is None else row[column]
    if isinstance(options, str):
        try:
            options = ast.literal_eval(options)
        except (ValueError, SyntaxError):
            options = None
    if not isinstance(options, list) or len(options) > len(_LETTERS):
        raise RendererError(
            f"{column}: got {row.get(str(column))!r:.80}, expected a list of up to {len(_LETTERS)} "
            "options"
        )
    letters = _LETTERS[: len(options)] or _LETTERS
    if options and isinstance(plain.get("question"), str):
        lines = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
        plain["question"] = "\n".join([plain["question"], *lines, _INSTRUCTION])
    elif options:
        raise RendererError(f"{column}: got options, expected them next to a text in question")
    answer = plain.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        answer = letters[answer]
    elif answer in options:
        answer = letters[options.index(answer)]
    elif isinstance(answer, str) and len(answer.strip(" ().")) == 1:
        answer = answer.strip(" ().").upper()
    if not isinstance(answer, str) or answer not in letters or not answer:
        raise RendererError(
            f"answer: got {plain.get('answer')!r:.80}, expected one of the letters {letters}, the "
            "number of an option from 0, or its text"
        )
    return _with_marked_images({**plain, "answer": answer}, folder), letters


def _with_marked_images(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Moves the images of ``image_1`` … to one column, in the order of their marks."""
    found = {name: row.pop(name) for name in list(row) if re.fullmatch(r"image_\d+", name)}
    found = {name: image for name, image in found.items() if image is not None}
    if not found:
        return row
    numbers = _MARK.findall(str(row.get("question")))
    missing = [number for number in numbers if f"image_{number}" not in found]
    if missing:
        raise RendererError(f"question: got the mark <image {missing[0]}> without its image")
    row["question"] = _MARK.sub(MARK, row["question"])
    images = [found[f"image_{number}"] for number in numbers] or list(found.values())
    row["images"] = images
    resolve_paths(row, folder)
    return row
