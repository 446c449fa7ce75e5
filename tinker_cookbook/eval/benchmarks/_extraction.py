r"""Extracts the answer of a response: a number, a choice's letter, a short text, code.

Each function returns ``""`` if a response has no answer: with a guess, a response without
an answer would sometimes be right.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction

from tinker_cookbook.rl.envs.grading import extract_boxed, last_number
from tinker_cookbook.sandbox.program_text import code_blocks, parse_program

_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_SPACING = re.compile(r"\\[,!;: ]|\\q?quad|~")
# In "answer is 5 apples + 3 apples = 8", the answer is 8; in "answer is 8, since 5 + 3 = 8" the sum
# begins after it. Quantifiers are possessive, so that no text takes quadratic time.
_CLAUSE = r"(?:and|as|because|but|for|from|if|or|since|so|that|when|where|which|with)\b"
_OPERATOR = r"[-+*/×÷·^%]|\b(?:times|of|plus|minus|cdot|div)\b|\bx\s*[\d$(\\]"
_TERM = rf"(?>{_NUMBER}|(?!{_CLAUSE})[^\W\d_]+|[-+*/×÷·^%$(){{}}\\])"
_SUM = rf"(?={_NUMBER}[^=\n]*?(?:{_OPERATOR}))(?:(?:{_TERM}\s*+)++=[\s*$\\(]*+)+"
_STATED_NUMBER = re.compile(
    rf"answer(?:\s+\w+){{0,4}}?\s*(?:is|:|=)\s*(?:about|approximately|exactly)?[\s*$\\(]*"
    rf"(?:{_SUM})?({_NUMBER})",
    re.IGNORECASE,
)
_BOLD_NUMBER = re.compile(rf"\*\*[^*\d]{{0,3}}?({_NUMBER})(?!\.\s)[^*\d]{{0,20}}\*\*")
_TOLERANCE = Fraction(1, 100_000)


def extract_number(text: str) -> str:
    r"""Returns the number of a short answer without commas, units and LaTeX: ``\$1{,}000`` is 1000.

    After an equals sign, it is the number after the last one. A fraction becomes a decimal
    number. An answer without a number is returned unchanged.
    """
    plain = _SPACING.sub("", text).replace("{,}", ",").replace("\\$", "").replace("$", "")
    # A \text{…} is a unit unless it contains digits.
    plain = re.sub(r"\\(?:text|mbox|mathrm)\s*\{([^{}\d]*)\}", " ", plain)
    plain = re.sub(r"-\s+(?=[\d.])", "-", plain.rpartition("=")[2] or plain)
    fraction = _FRACTION.search(plain)
    if fraction and int(fraction[3]):
        value = Fraction(int(fraction[1] + "1") * int(fraction[2]), int(fraction[3]))
        return str(value if value.denominator == 1 else float(value))
    found = re.search(_NUMBER, plain)
    return found[0].replace(",", "") if found else text.strip()


def extract_gsm8k_answer(text: str) -> str:
    r"""Returns the final number of a response without commas, or ``""``.

    It is the number in the last ``\boxed{…}``, else on the line of the last ``####``, else after
    the last "answer is", else in bold on the last line, else the last number.
    """
    boxed = extract_boxed(text)
    if boxed is not None and re.search(r"\d", boxed):
        return extract_number(boxed)
    _, marked, after = text.rpartition("####")
    if marked and re.search(r"\d", line := after.strip().split("\n")[0]):
        return extract_number(line)
    stated = _STATED_NUMBER.findall(text)
    # Bold numbers in earlier lines are usually steps, not the result.
    bold = _BOLD_NUMBER.findall(text.strip().rpartition("\n")[2])
    for found in (stated, bold):
        if found:
            return found[-1].replace(",", "")
    return last_number(text) or ""


def check_gsm8k(response: str, expected: str) -> bool:
    """Returns whether the final number of a response is ``expected``, within 1e-5."""
    given = extract_gsm8k_answer(response)
    try:
        difference = Fraction(given) - Fraction(expected.replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return given.strip() == expected.strip()
    return abs(difference) < _TOLERANCE


# A and I are also words, so without brackets they count only where a word is impossible.
_END = r"(?=\s*(?:$|\n|[.,;:!?)\]]|because\b|since\b|and\b|[-–—]\s))"
_NO_TAIL = r"(?![\w'’+#]|-\w|\s*=)"
_NEGATED = re.compile(
    r"\s*(?:(?:is|are|was)\s*(?:not|n[o']t|incorrect|wrong|false)|isn['’]t|can(?:no|['’])t|"
    r"(?:is|are) (?:eliminated|ruled)|no\b|wrong\b|or\s+(?:option\s+)?\(?[A-J]\b)",
    re.IGNORECASE,
)
_CONCLUSION = r"(?:so|choose|chose|pick|select|go with|therefore|thus|hence)"
_REJECTED = re.compile(
    r"(?:\bnot|neither|nor|eliminat\w+|ruled? out|exclud\w+|rather than|instead of|than)\s+"
    r"(?:(?:option|choice|answer)\s+)?$",
    re.IGNORECASE,
)
# **B**, `B`, "B", $B$, [B], \text{B} and \boxed{B} all become (B).
_WRAPPED = re.compile(
    r"(?:\\(?:boxed|text|textbf|mathbf|mathrm|mbox)\s*\{|\*\*|__|`|[\"“'‘]|\$|\[|\{|>)"
    r"\s*\(?([A-Za-z])\)?[.)]?\s*(?:\}|\*\*|__|`|[\"”'’]|\$|\]|<)"
)


def extract_mcq_answer(text: str, valid_letters: str = "ABCD") -> str:
    r"""Returns the letter that a response chooses, or ``""``.

    It is the letter in the last ``\boxed{…}``, else after the last "answer is", else alone on a
    line or at the start of the response, else the last one that the final 300 characters name as
    an option. "A" and "I" as words, and letters inside words, do not count.
    """
    letters = valid_letters.upper()
    boxed = extract_boxed(text)
    if boxed is not None:
        inner = re.sub(r"\\(?:text|textbf|mathbf|mathrm|mbox)\s*\{", "", boxed)
        found = re.match(rf"[\s(\[]*([{letters}])(?:[\s)\]}}.:]|$)", inner, re.IGNORECASE)
        if found and not (found[1] in "AI" and re.match(r"\s\w", inner[found.end(1) :])):
            return found[1].upper()
    plain, before = text, None
    while plain != before:
        # Wrappers may be nested, as in $\boxed{\text{B}}$.
        plain, before = _WRAPPED.sub(r"(\1)", plain), plain
    plain = plain.replace("((", "(").replace("))", ")").replace("*", "").replace("_", " ")
    return (
        _stated_letter(plain, letters)
        or _letter_line(plain, letters)
        or _named_letter(plain[-300:], letters)
    )


def _bare(letters: str) -> str:
    """Returns the pattern of a letter in brackets (group 1) or without (groups 2 and 3)."""
    words = "".join(letter for letter in letters if letter in "AI")
    others = "".join(letter for letter in letters if letter not in "AI")
    # A lower-case letter needs brackets or an end after it: "the answer is a matter of taste".
    strict = f"{words}{letters.lower()}"
    either = letters + letters.lower()
    return rf"(?:\(([{either}])\)|([{others or '¬'}]){_NO_TAIL}|([{strict}]){_END})"


def _stated_letter(plain: str, letters: str) -> str:
    stated = re.compile(
        r"\b(?i:answer|choice|option|solution)\b(?:[^.\n:=]{0,40}?(?:\b(?i:is|be|are)\b|[:=])|\s+)\s*"
        r"(?:(?i:definitely|clearly|probably|most likely|therefore|likely|indeed|simply|thus)\s+)?"
        rf"(?:(?i:option|choice|letter|answer)\s+)?{_bare(letters)}"
    )
    kept = [
        "".join(filter(None, found.groups()))
        for found in stated.finditer(plain)
        if not _NEGATED.match(plain, found.end())
        and not _REJECTED.search(plain[max(0, found.start() - 20) : found.start()])
        # "Option B: …" only names an option; "the answer: B" chooses one.
        and re.search(r"(?i:answer|solution|\bis|\bbe|[:=])", found[0])
    ]
    return kept[-1].upper() if kept else ""


def _letter_line(plain: str, letters: str) -> str:
    lines = [line.strip() for line in plain.split("\n") if line.strip()]
    alone = [found[1] for x in lines if (found := re.fullmatch(rf"\(?([{letters}])\)?[.):]?", x))]
    if alone:
        return alone[-1]
    openings = [
        found[1] or found[2]
        for line in lines
        if (found := re.match(rf"(?:\(([{letters}])\)|([{letters}])[.):])(?:\s|$)", line))
    ]
    # Several lines that begin with letters are a list of the options.
    if len(set(openings)) != 1:
        return ""
    first = re.match(rf"\(?{openings[0]}[.):]+", lines[0])
    if first is None or _NEGATED.match(lines[0], first.end()):
        return ""
    # "(A) stays constant. Therefore (C)" begins with an option and chooses another one.
    concluded = re.findall(rf"\b(?i:{_CONCLUSION})\s+{_bare(letters)}", plain)
    return "".join(concluded[-1]) if concluded else openings[0]


def _named_letter(plain: str, letters: str) -> str:
    named = re.compile(
        rf"\(([{letters}])\)|\b(?i:option|choice|letter)\s+([{letters}]){_NO_TAIL}"
        rf"|\b([{letters}])\s+(?:is|seems)\s+(?:the\s+)?(?:only\s+)?(?:correct|right|best|true)\b"
        rf"|(?i:{_CONCLUSION}|be|[:→—]|=>)\s+{_bare(letters)}"
    )
    kept = [
        "".join(filter(None, found.groups()))
        for found in named.finditer(plain)
        if not _NEGATED.match(plain, found.end())
        and not _REJECTED.search(plain[max(0, found.start() - 30) : found.start()])
    ]
    return kept[-1].upper() if kept else ""


_ANSWER_IS = re.compile(r"\banswer(?:\s+\w+){0,4}?\s*(?:is\s*:?|:|=)\s*", re.IGNORECASE)


def extract_final_answer(text: str) -> str:
    r"""Returns the last ``\boxed{…}``, else the rest of the line after the last "answer is".

    Without both, it is the last non-blank line. Markdown and the final full stop are
    removed.
    """
    boxed = extract_boxed(text)
    found = boxed
    if found is None:
        *_, last = [None, *_ANSWER_IS.finditer(text)]
        rest = text[last.end() :] if last else text.strip().rpartition("\n")[2]
        found = rest.strip().partition("\n")[0]
    found = re.sub(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}", r"\1", found)
    return found.replace("**", "").replace("`", "").strip(" \"'$").rstrip(".").strip(" \"'$")


def extract_python_code(text: str, entry_point: str | None = None) -> str:
    """Returns the Python code of a response: the block that defines ``entry_point``.

    If there is none: the first block with a definition, else the first block. Blocks that are
    tagged as Python are preferred. A truncated block ends with the text. Without a block,
    the whole text is returned.
    """
    blocks = code_blocks(text)
    if not blocks:
        return text.strip()
    tagged = [block for block in blocks if block.is_python]
    untagged = [block for block in blocks if not block.tag]
    codes = [block.code.strip() for block in tagged or untagged or blocks]
    for code in codes:
        names = _defined(code)
        if entry_point in names or (entry_point is None and names):
            return code
    return next((code for code in codes if _defined(code)), codes[0])


def _defined(code: str) -> set[str]:
    try:
        body = parse_program(code).body
    except (SyntaxError, ValueError):
        return set(re.findall(r"^(?:async\s+)?(?:def|class)\s+(\w+)", code, re.MULTILINE))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in body if isinstance(node, kinds)}
