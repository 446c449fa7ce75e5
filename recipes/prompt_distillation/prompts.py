"""Prompts of the teacher, and the rules that select its answers.

The recipe has two prompts for one task, naming the language of a text. ``language`` is the long
one: rules for code, numbers and mixed text, answers of two letters. It needs a model that can
follow rules; SmolLM2-135M-Instruct got 0 of 48 texts right with an earlier, shorter one.
``language_by_examples`` shows texts with the names of their languages, which so small a model can
continue; the names become the same two letters, so the student learns the same task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
    RendererError,
    nearest_sentence,
)
from tinker_cookbook.renderers import Message, normalize_messages

PLACEHOLDER = "{query}"

LANGUAGE_NAMES = {
    "ar": "Arabic",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "hi": "Hindi",
    "ru": "Russian",
    "tr": "Turkish",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "zh": "Chinese",
    "ot": "Other",
}

# The text of the official cookbook (Apache 2.0), for ``str.format``: published runs have it.
LANGUAGE_CLASSIFICATION_PROMPT = """\
You are a precise language classifier.

Goal: Classify the language of the provided text into exactly one of these labels:
ar (Arabic), de (German), el (Greek), en (English), es (Spanish), fr (French),
hi (Hindi), ru (Russian), tr (Turkish), ur (Urdu), vi (Vietnamese),
zh (Chinese - Simplified), ot (Other/Unknown).

Instructions:
1) Preprocess carefully (without changing the intended meaning):
   - Trim whitespace.
   - Ignore URLs, emails, file paths, hashtags, user handles, and emojis.
   - Ignore numbers, math expressions, and standalone punctuation.
   - If there is code, IGNORE code syntax (keywords, operators, braces) and focus ONLY on human \
language in comments and string literals.
   - Preserve letters and diacritics; do NOT strip accents.
   - If after ignoring the above there are no alphabetic letters left, output 'ot'.

2) Script-based rules (highest priority):
   - Devanagari script → hi.
   - Greek script → el.
   - Cyrillic script → ru.
   - Han characters (中文) → zh. (Treat Traditional as zh too.)
   - Arabic script → ar vs ur:
       • If Urdu-only letters appear (e.g., ے, ڑ, ں, ھ, ٹ, ڈ, کھ, گ, چ with Urdu forms), or \
clear Urdu words, choose ur.
       • Otherwise choose ar.
   (If multiple scripts appear, pick the script that contributes the majority of alphabetic \
characters. If tied, go to step 5.)

3) Latin-script heuristics (use when text is mainly Latin letters):
   - vi: presence of Vietnamese-specific letters/diacritics (ă â ê ô ơ ư đ, plus dense \
diacritics across many words).
   - tr: presence of Turkish-specific letters (ı İ ğ Ğ ş Ş ç Ç ö Ö ü Ü) and common function \
words (ve, bir, için, değil, ama, çok).
   - de: presence of umlauts (ä ö ü) or ß and common function words (und, der, die, das, nicht, \
ist).
   - es: presence of ñ, ¿, ¡ and common words (y, de, la, el, es, no, por, para, con, gracias, \
hola).
   - fr: frequent French diacritics (é è ê à ç ô â î û ù) and common words (et, le, la, les, \
des, une, est, avec, pour, merci, bonjour).
   - en: default among Latin languages if strong evidence for others is absent, but ONLY if \
English function words are present (the, and, is, are, to, of, in, for, on, with). If evidence \
is insufficient for any Latin language, prefer 'ot' over guessing.

4) Named entities & loanwords:
   - Do NOT decide based on a single proper noun, brand, or place name.
   - Require at least two function words or repeated language-specific signals \
(diacritics/letters) before assigning a Latin-language label.

5) Mixed-language text:
   - Determine the dominant language by counting indicative tokens (language-specific \
letters/diacritics/function words) AFTER preprocessing.
   - If two or more languages are equally dominant or the text is a deliberate multi-language \
mix, return 'ot'.

6) Very short or noisy inputs:
   - If the text is ≤2 meaningful words or too short to be confident, return 'ot' unless there \
is a very strong language-specific signal (e.g., “bonjour” → fr, “hola” → es).

7) Transliteration/romanization:
   - If Hindi/Urdu/Arabic/Chinese/Russian/Greek is written purely in Latin letters (romanized) \
without clear, repeated language-specific cue words, return 'ot'. (Only classify as \
hi/ur/ar/zh/ru/el when native scripts or highly distinctive romanized patterns are clearly \
present.)

8) Code-heavy inputs:
   - If the text is mostly code with minimal or no natural-language comments/strings, return \
'ot'.
   - If comments/strings clearly indicate a language per rules above, use that label.

9) Ambiguity & confidence:
   - When in doubt, choose 'ot' rather than guessing.

Output format:
- Respond with EXACTLY one line: "Final Answer: xx"
- Where xx ∈ {{ar, de, el, en, es, fr, hi, ru, tr, ur, vi, zh, ot}} and nothing else.

Text to classify:
{text}
"""

_LANGUAGE_PROMPT = LANGUAGE_CLASSIFICATION_PROMPT.format(text=PLACEHOLDER)

# None of these texts is a query of example_data/languages.jsonl. The order matters to a small
# model, which favours what it saw last: SmolLM2-135M-Instruct got 69% of 110 texts right with this
# one, and 52% to 65% with others.
_EXAMPLES = (
    ("Guten Abend, wie geht es Ihnen?", "de"),
    ("Je ne sais pas où il est.", "fr"),
    ("¿Qué hora es?", "es"),
    ("12345", "ot"),
    ("Bugün hava çok güzel.", "tr"),
    ("Hôm nay trời đẹp.", "vi"),
    ("Сегодня хорошая погода.", "ru"),
    ("Καλημέρα σας.", "el"),
    ("صباح الخير يا صديقي.", "ar"),
    ("آج موسم اچھا ہے۔", "ur"),
    ("आज मौसम अच्छा है।", "hi"),
    ("今天天气很好。", "zh"),
    ("Dove sei?", "ot"),
    ("Nice to meet you.", "en"),
)


@dataclass(frozen=True)
class TeacherPrompt:
    """Messages with ``{query}`` for the query; without it the query follows as a user message."""

    messages: tuple[Message, ...]

    def messages_for(self, query: str) -> list[Message]:
        """Returns the teacher's prompt for ``query``."""
        filled = [
            Message(role=m["role"], content=str(m["content"]).replace(PLACEHOLDER, query))
            for m in self.messages
        ]
        if not self.has_placeholder:
            filled.append(Message(role="user", content=query))
        return filled

    @property
    def has_placeholder(self) -> bool:
        """Whether the messages contain ``{query}``."""
        return any(PLACEHOLDER in str(m["content"]) for m in self.messages)


def misspelt_placeholder(prompt: TeacherPrompt) -> str | None:
    """Returns a likely misspelling of ``{query}`` in a prompt without it, or ``None``."""
    if prompt.has_placeholder:
        return None
    text = "\n".join(str(message["content"]) for message in prompt.messages)
    words = re.findall(r"\{(\w+)\}", text)
    # With a typo the query would be appended to the prompt and the typo sent to the teacher.
    close = get_close_matches(PLACEHOLDER.strip("{}"), [word.lower() for word in words], n=1)
    return f"{{{close[0]}}}" if close else None


@dataclass(frozen=True)
class Task:
    """A prompt, and the rules that select and translate its answers."""

    prompt: TeacherPrompt
    answer_regex: str | None
    """Regex of the part of an answer that is kept; None: all of it."""
    labels: Mapping[str, str] | None
    """Possible answers, each with the student's target for it; None: any answer."""


TASKS: Mapping[str, Task] = {
    "language": Task(
        TeacherPrompt((Message(role="user", content=_LANGUAGE_PROMPT),)),
        # Searched in the whole answer, because a model may write other text first.
        r"(?i)\banswer:\s*([a-z]{2})\b",
        {code: code for code in LANGUAGE_NAMES},
    ),
    "language_by_examples": Task(
        TeacherPrompt(
            tuple(
                message
                for text, code in _EXAMPLES
                for message in (
                    Message(role="user", content=text),
                    Message(role="assistant", content=LANGUAGE_NAMES[code]),
                )
            )
        ),
        # The first word only: what a small model writes after it is ignored.
        r"^\s*([A-Za-z]+)\b",
        {name: code for code, name in LANGUAGE_NAMES.items()},
    ),
}


def find_task(name: str) -> Task:
    """Returns the task of that name; ``ConfigurationError`` for another name."""
    if name not in TASKS:
        raise ConfigurationError(
            f"task: got {name!r}, expected one of {', '.join(TASKS)}"
            f"{nearest_sentence(name, TASKS)} For your own prompt set teacher_prompt_file=…"
        )
    return TASKS[name]


def read_teacher_prompt(path: str) -> TeacherPrompt:
    """Returns the prompt in a file.

    A ``.json`` file holds a list of messages, such as worked examples. Any other file is text: a
    user message if it has ``{query}`` in it, else a system message.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise DataValidationError(
            f"teacher_prompt_file: there is no file {file} (searched from {Path.cwd()}); expected "
            "a text file, or a .json file with a list of messages"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataValidationError(
            f"teacher_prompt_file: {file} cannot be read: {error}; expected a UTF-8 text file"
        ) from error
    if not text:
        raise DataValidationError(
            f"teacher_prompt_file: {file} is empty; expected the teacher's instructions"
        )
    if file.suffix != ".json":
        role = "user" if PLACEHOLDER in text else "system"
        return TeacherPrompt((Message(role=role, content=text),))
    expected = 'expected a list such as [{"role": "system", "content": "…"}, …]'
    try:
        raw: Any = json.loads(text)
    except ValueError as error:
        raise DataFormatError(f"{file}: not JSON ({error}); {expected}") from error
    if not isinstance(raw, list) or not raw:
        raise DataFormatError(f"{file}: got a JSON {type(raw).__name__}; {expected}, not empty")
    try:
        messages = normalize_messages(raw)
    except RendererError as error:
        raise DataFormatError(f"{file}: {error}") from error
    for i, message in enumerate(messages):
        if not isinstance(message["content"], str):
            raise DataFormatError(f"{file}: messages[{i}].content is not plain text; {expected}")
    return TeacherPrompt(tuple(messages))
