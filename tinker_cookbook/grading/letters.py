r"""Finds the letter of the choice in a response: the one grader of multiple choice."""

from __future__ import annotations

import re

from tinker_cookbook.grading.texts import (
    boxed_answer,
    plain_characters,
    split_thinking,
    without_text_commands,
)

# A and I are also words, so without brackets they count only where a word is impossible.
_END = r"(?=\s*(?:$|\n|[.,;:!?)\]]|because\b|since\b|and\b|[-–—]\s))"
_NO_TAIL = r"(?![0-9A-Za-z\u00c0-\u024f_'’+#]|-\w|\s*=)"
_NEGATED = re.compile(
    r"\s*(?:(?:is|are|was)\s*(?:not|n[o']t|incorrect|wrong|false)|isn['’]t|can(?:no|['’])t|"
    r"(?:is|are) (?:eliminated|ruled)|no\b|wrong\b|or\s+(?:option\s+)?\(?[A-J]\b)",
    re.IGNORECASE,
)
_CONCLUSION = (
    r"(?:so|choose|chose|pick|select|go with|(?:therefore|thus|hence|finally),?|it's|it is)"
)
_REJECTED = re.compile(
    r"(?:\bnot|neither|nor|eliminat\w+|ruled? out|exclud\w+|rather than|instead of|than)\s+"
    r"(?:(?:option|choice|answer)\s+)?$",
    re.IGNORECASE,
)
# **B**, `B`, "B", $B$, \(B\), [B], \text{B} and \boxed{B} all become (B).
_WRAPPED = re.compile(
    r"(?:\\(?:boxed|text|textbf|mathbf|mathrm|mbox)\s*\{|\*\*|__|`|[\"“'‘「『]|\$|\\\(|\[|\{|【|>)"
    r"\s*\(?([A-Za-z])\)?[.)]?\s*(?:\}|\*\*|__|`|[\"”'’」』]|\$|\\\)|\]|】|<)"
)
_NOUN = (
    r"(?:\b(?i:answer|choice|option|solution|antwort|lösung|réponse|reponse|respuesta|opción|"
    r"risposta|resposta|alternativa|opção|ответ|вариант)\b"
    r"|答案|选项|選項|答え|正解|答|정답|답|उत्तर)"
)
_VERB = r"(?:\b(?i:is|be|are|ist|lautet|est|es|è|é|será)\b|应为|应该是|是|为|為|选|は|은|는|[:=])"
_DASH = r"\s+[-–—]+\s+"
_PLAIN_CHOICE = r"(?:故选|所以选|因此选|应选|应选择|选择|选|選)[:：]?\s*"
# "Vitamin C is the answer" names no choice.
_BEFORE = (
    r"(?i:so|that|think|believe|say|hence|thus|therefore|then|only|option|choice|letter|and|but)"
)
_PAIR = (
    r"\s*(?:,|/|&|\+|\bor\b|\band\b|\bund\b|\by\b|\bet\b|和|或|、|及)+\s*(?:(?:option|choice)\s+)?"
)
# A second letter that ends there too; "B and C is wrong" chooses B.
_PAIR_END = (
    r"(?=\s*(?:$|\n|[.;!?)]|,\s*(?:and|or)\b|\b(?:are|both|could|may|might)\b"
    r"|(?:,|\band)\s*\(?[A-J]\b))"
)


def extract_mcq_answer(text: str, valid_letters: str = "ABCD") -> str:
    r"""Returns the letter that a response chooses, or ``""``.

    It is the letter in the last ``\boxed{…}``, else after the last "answer is", else alone on a
    line or at the start of the response, else the last one that the final 300 characters name as
    an option. "A" and "I" as words, and letters inside words, do not count; two letters are no
    choice.
    """
    letters, (text, _) = valid_letters.upper(), split_thinking(text)
    boxed = boxed_answer(text)
    if boxed is not None:
        inner = without_text_commands(boxed[1]).replace("$", "").strip()
        found = re.match(rf"[\s(\[]*([{letters}])(?:[\s)\]}}.:,/&]|$)", inner, re.IGNORECASE)
        if found and _is_pair(inner, found.end(1), letters):
            return ""
        if found and not (found[1] in "AI" and re.match(r"\s\w", inner[found.end(1) :])):
            return found[1].upper()
    # The full-width stop and colon become those of ASCII here, as do full-width letters.
    plain, before = plain_characters(text), None
    while plain != before:
        # Wrappers may be nested, as in $\boxed{\text{B}}$.
        plain, before = _WRAPPED.sub(r"(\1)", plain), plain
    plain = plain.replace("((", "(").replace("))", ")").replace("*", "").replace("_", " ")
    for find in (_stated_letter, _letter_line, _named_letter):
        chosen = find(plain, letters)
        if chosen is not None:
            return chosen
    return ""


def _is_pair(text: str, end: int, letters: str) -> bool:
    """Returns whether a second letter follows the one that ends at ``end``: "A and B"."""
    second = re.compile(
        rf"\s*\)?{_PAIR}\(?([{letters}{letters.lower()}])\)?{_NO_TAIL}{_PAIR_END}", re.IGNORECASE
    )
    return second.match(text, end) is not None


def _bare(letters: str) -> str:
    """Returns the pattern of a letter in brackets (group 1) or without (groups 2 and 3)."""
    words = "".join(letter for letter in letters if letter in "AI")
    others = "".join(letter for letter in letters if letter not in "AI")
    # A lower-case letter needs brackets or an end after it: "the answer is a matter of taste".
    strict = f"{words}{letters.lower()}"
    either = letters + letters.lower()
    return rf"(?:\(([{either}])\)|([{others or '¬'}]){_NO_TAIL}|([{strict}]){_END})"


def _last_kept(found: list[re.Match[str]], plain: str, letters: str, before: int) -> str | None:
    """Returns the last letter that is not rejected; ``""`` for two letters, None for none."""
    kept = [
        match
        for match in found
        if not _NEGATED.match(plain, match.end())
        and not _REJECTED.search(plain[max(0, match.start() - before) : match.start()])
    ]
    if not kept:
        return None
    if _is_pair(plain, kept[-1].end(), letters):
        return ""
    return "".join(filter(None, kept[-1].groups())).upper()


def _stated_letter(plain: str, letters: str) -> str | None:
    stated = re.compile(
        rf"{_NOUN}(?:[^.\n:=]{{0,40}}?{_VERB}|{_DASH}|】|\s+)\s*"
        r"(?:(?i:definitely|clearly|probably|most likely|therefore|likely|indeed|simply|thus)\s+)?"
        rf"(?:(?i:option|choice|letter|answer)\s+|选项|選項)?{_bare(letters)}"
    )
    found = [
        match
        for match in stated.finditer(plain)
        # "Option B: …" only names an option; "the answer: B" chooses one.
        if re.search(rf"(?!(?i:option|choice|вариант|opción)\b|选项|選項){_NOUN}|{_VERB}", match[0])
    ]
    return _last_kept(found, plain, letters, 20)


def _letter_line(plain: str, letters: str) -> str | None:
    lines = [line.strip() for line in plain.split("\n") if line.strip()]
    either = letters + letters.lower()
    alone = [
        found[1] or found[2]
        for line in lines
        # A lower-case "a" or "i" alone on one of several lines is a numbering.
        if (found := re.fullmatch(rf"(?:\(([{either}])\)|([{letters}]))[.):]?", line))
        or (len(lines) == 1 and (found := re.fullmatch(rf"\(?([{either}])()\)?[.):]?", line)))
    ]
    if alone:
        return alone[-1].upper()
    # Several lines that begin with lower-case letters may be parts of a solution.
    begins = either if len(lines) == 1 else letters
    first = re.match(rf"\(?[{begins}]", lines[0]) if len(lines) == 1 else None
    if first is not None and _is_pair(lines[0], first.end(), letters):
        return ""
    openings = [
        found[1] or found[2]
        for line in lines
        if (found := re.match(rf"(?:\(([{begins}])\)|([{begins}])[.):])(?:\s|$)", line))
    ]
    # Several lines that begin with letters are a list of the options.
    if len(set(openings)) != 1:
        return None
    first = re.match(rf"\(?{openings[0]}[.):]+", lines[0])
    if first is None or _NEGATED.match(lines[0], first.end()):
        return None
    # "(A) stays constant. Therefore (C)" begins with an option and chooses another one.
    concluded = re.findall(rf"\b(?i:{_CONCLUSION})\s+{_bare(letters)}", plain)
    return ("".join(concluded[-1]) if concluded else openings[0]).upper()


def _named_letter(plain: str, letters: str) -> str | None:
    plain = plain[-300:].replace("’", "'")
    named = re.compile(
        rf"\(([{letters}])\)|\b(?i:option|choice|letter)\s+([{letters}]){_NO_TAIL}"
        rf"|{_PLAIN_CHOICE}\(?([{letters}])"
        rf"|(?:^|[-.!?;:,(\n]\s*|\b{_BEFORE}\s+)([{letters}])\s+(?:is|seems)\s+(?:the\s+)?(?:only\s+)?"
        r"(?:correct|right|best|true|answer|choice)\b"
        rf"|([{letters}])\s*(?:是正确|正确|是对的|项正确|选项正确)"
        rf"|(?i:\b{_CONCLUSION}|\bbe|[:→—]|=>)\s+{_bare(letters)}"
    )
    return _last_kept(list(named.finditer(plain)), plain, letters, 30)
