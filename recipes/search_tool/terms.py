"""Splits texts into the terms that BM25 compares."""

from __future__ import annotations

import re
import unicodedata

# Scripts that do not separate words with spaces.
_UNSPACED = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
_TERM = re.compile(rf"{_UNSPACED}+|(?:(?!{_UNSPACED})\w)+")
_IS_UNSPACED = re.compile(_UNSPACED)


def terms(text: str) -> list[str]:
    """Returns the terms of a text in order: words without case and plural endings.

    Text in a script without spaces (Chinese, Japanese, Thai) becomes pairs of characters. There is
    no list of stop words, so that every language works; BM25 gives frequent terms little weight.
    """
    found: list[str] = []
    for word in _TERM.findall(unicodedata.normalize("NFKC", text).casefold()):
        if _IS_UNSPACED.match(word) and len(word) > 1:
            found += [word[i : i + 2] for i in range(len(word) - 1)]
        else:
            found.append(_singular(word))
    return found


def _singular(word: str) -> str:
    """Removes a plural ending by the three rules of Harman's S stemmer (1991)."""
    if len(word) <= 3:
        return word
    if word.endswith("ies") and word[-4] not in "ae":
        return f"{word[:-3]}y"
    if word.endswith("es") and word[-3] not in "aeo":
        return word[:-1]
    if word.endswith("s") and not word.endswith(("us", "ss")):
        return word[:-1]
    return word
