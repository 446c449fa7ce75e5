"""Grading of transcripts: texts of responses, and word error rates."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from tinker_cookbook.renderers import ParseTermination, Renderer, get_text_content

logger = logging.getLogger(__name__)

_SPECIAL_TOKEN = re.compile(r"<\|[^|]+\|>")


def parse_response_text(renderer: Renderer, action: list[int]) -> tuple[str, ParseTermination]:
    """Returns the text of a response without special tokens, and how it ended.

    A response that the renderer refuses, such as one that is cut within a character, is malformed
    and empty: a bad sample must not end a run.
    """
    try:
        message, termination = renderer.parse_response(action)
    except ValueError as error:
        logger.warning("a response cannot be read and counts as malformed: %s", error)
        return "", ParseTermination.MALFORMED
    return _SPECIAL_TOKEN.sub(" ", get_text_content(message)).strip(), termination


def normalize_text(text: str) -> str:
    """Returns lower-case words of letters, digits and apostrophes with one space between them."""
    return " ".join(re.sub(r"[^a-z0-9' ]+", " ", text.lower()).split())


def clip_wer(ref: str, hyp: str) -> float:
    """Returns the word error rate of one transcript; 0 without a reference."""
    return corpus_wer([ref], [hyp])


def corpus_wer(refs: Sequence[str], hyps: Sequence[str]) -> float:
    """Returns the errors of all transcripts by the words of all references; may exceed 1."""
    pairs = [(normalize_text(r), normalize_text(h)) for r, h in zip(refs, hyps, strict=True)]
    words = [(ref.split(), hyp.split()) for ref, hyp in pairs if ref]
    total = sum(len(ref) for ref, _ in words)
    return sum(edit_distance(ref, hyp) for ref, hyp in words) / total if total else 0.0


def edit_distance(ref: Sequence[str], hyp: Sequence[str]) -> int:
    """Returns the fewest insertions, deletions and substitutions of words."""
    above = list(range(len(hyp) + 1))
    for i, word in enumerate(ref, 1):
        row = [i]
        for j, other in enumerate(hyp, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (word != other)))
        above = row
    return above[-1]
