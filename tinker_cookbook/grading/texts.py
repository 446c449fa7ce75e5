r"""Where the answer of a response stands: in a box, behind "answer is", or on the last line."""

from __future__ import annotations

import re
import unicodedata

_TAG = "(?:think|thinking|thought|reasoning)"
# Only at the start of a line: elsewhere the tag may be quoted, as in a program. A block that is
# never closed was cut off.
_THINKING = re.compile(rf"^[ \t]*<{_TAG}>(.*?)(?:</{_TAG}>\s*|\Z)", re.DOTALL | re.MULTILINE)
_END_OF_THINKING = re.compile(rf"(.*)</{_TAG}>\s*", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# LaTeX also allows \boxed without braces, as in "\boxed 5".
_WORD_BOX = re.compile(r"\\boxed\s*([^\s${\\][^\s$]*)")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mbox|mathrm|mathbf|mathsf)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})")
# Boxes with only these between them are one answer: \boxed{1}, \boxed{2} and $\boxed{3}$.
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;/*]|\\[()\[\],; ]|\\q?quad\b|\\text\s*\{\s*(?:and|or)\s*\}"
    r"|\b(?:and|or|y|o|und|oder|et|ou)\b|或|和|[a-zA-Z](?:_\{?\d\}?)?\s*=)*"
)
ANSWER = (
    r"(?:\b(?:answer|antwort|réponse|reponse|respuesta|risposta|resposta|ответ)\b"
    r"|答案|答え|答|정답|답|उत्तर)"
)
"""The word "answer" in the languages of the usual multilingual benchmarks; match without case."""
IS = r"(?:\b(?:is|are|be|ist|lautet|est|es|è|é|será)\b|是|为|為|は|[:：=])"
"""What connects that word with the answer."""
_ANSWER_IS = re.compile(rf"{ANSWER}(?:\s+\w+){{0,4}}?\s*{IS}[:：]?\s*", re.IGNORECASE)
# Signs, digits and spaces that have another code, but the same meaning.
_SAME = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009", " "),
    **dict.fromkeys("\u200a\u202f\u205f\u3000", " "),
    **dict.fromkeys("\u200b\u2060\ufeff\u200e\u200f", ""),
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if code != 0xFF0D},
    "\u2044": "/",
    "\u2215": "/",
    "\u3002": ". ",
    "\u3001": ", ",
}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")


def split_thinking(text: str) -> tuple[str, str]:
    """Returns a response without its ``<think>`` blocks, and what they contain.

    A renderer without thinking leaves them in the text. Many chat templates end the prompt with
    the opening tag, so only the closing one may be there.
    """
    if "<" not in text:
        return text, ""
    found = [match[1].strip() for match in _THINKING.finditer(text)]
    if found:
        return _THINKING.sub("", text), "\n".join(found)
    closed = _END_OF_THINKING.match(text)
    if closed is None or re.search(rf"<{_TAG}>", closed[1]):
        return text, ""
    return text[closed.end() :], closed[1].strip()


def plain_characters(text: str) -> str:
    """Replaces signs, digits, spaces and fractions of Unicode by those of ASCII: ``−３½``."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(
        lambda m: "^{" + unicodedata.normalize("NFKC", m[0]).replace("\u2212", "-") + "}", text
    )
    text = "".join(map(_plain_character, text))
    return text.translate({ord(old): new for old, new in _SAME.items()})


def _plain_character(character: str) -> str:
    if character.isascii():
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character)
    return character


def without_text_commands(text: str) -> str:
    r"""Replaces ``\text{…}``, ``\mathrm{…}`` and the like by their content."""
    before = None
    while text != before:  # they may be nested
        text, before = _TEXT.sub(r"\1", text), text
    return text


def braced_fractions(text: str) -> str:
    r"""Writes ``\frac12`` as ``\frac{1}{2}``."""
    return _FRACTION.sub(
        lambda m: "\\frac" + "".join(f"{{{part.strip('{}')}}}" for part in m.groups()), text
    )


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Returns start, end and content of each complete box that is in no other one."""
    found: list[tuple[int, int, str]] = []
    for match in _BOX.finditer(text):
        depth = 0
        for i in range(match.end(), len(text)):
            # An escaped brace (a set, \{1, 2\}) does not nest.
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
                if depth == 0:
                    found.append((match.start(), i + 1, text[match.end() + 1 : i].strip()))
                    break
        else:
            break  # a truncated box contains the rest of the text
    return found or [(word.start(), word.end(), word[1]) for word in _WORD_BOX.finditer(text)]


def extract_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete ``\boxed{…}``, with nested braces, or None.

    Without braces, it is the word after ``\boxed``.
    """
    # The last box is the answer; if it is truncated, the previous box counts.
    boxes = _boxes(split_thinking(text)[0])
    return boxes[-1][2] if boxes else None


def boxed_answer(text: str) -> tuple[int, str] | None:
    r"""Returns the answer in the last boxes and the position behind them, or None.

    Boxes with only commas, "and" or "or" between them are one answer, the list of their contents.
    So two boxed solutions are one complete answer, and two boxed guesses are no answer. The
    position is that in the text without thinking.
    """
    text, _ = split_thinking(text)
    boxes = _boxes(text)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first and boxes[first - 1][1] <= boxes[first][0]:
        between = text[boxes[first - 1][1] : boxes[first][0]]
        if not between.strip() or not _BETWEEN_BOXES.fullmatch(between):
            break
        first -= 1
    contents = list(dict.fromkeys(content for _, _, content in boxes[first:]))
    return boxes[-1][1], ", ".join(contents)


def stated_answers(text: str) -> list[str]:
    """Returns the rest of the text after each "answer is" or "answer:"."""
    return [text[found.end() :] for found in _ANSWER_IS.finditer(text)]


def extract_final_answer(text: str) -> str:
    r"""Returns the last ``\boxed{…}``, else the rest of the line after the last "answer is".

    Without both, it is the last non-blank line. Markdown and the final full stop are
    removed.
    """
    text, _ = split_thinking(text)
    boxed = boxed_answer(text)
    if boxed is not None:
        found = boxed[1]
    else:
        stated = stated_answers(text)
        rest = stated[-1] if stated else text.strip().rpartition("\n")[2]
        found = rest.strip().partition("\n")[0]
    found = without_text_commands(found).replace("**", "").replace("`", "").strip(" \"'$")
    return found.rstrip(".。").strip(" \"'$")


def comparable_text(text: str) -> str:
    """Returns a short text without case, repeated spaces, quotes and the final full stop."""
    plain = re.sub(r"\s+", " ", plain_characters(text).replace("’", "'"))
    return plain.strip(" .\"'“”").casefold()
