"""Properties of a chat template, probed with small conversations.

Words that no template contains replace text, thinking and calls; what the template writes around
them is the format.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.tool_calls import JSON_CALL, read_json_call
from tinker_cookbook.renderers.template.text import Form, TemplateRefusal, TemplateText, plain
from tinker_cookbook.tokenizer_utils import Tokenizer

QUESTION, ANSWER, THOUGHT = "Zqquestion", "Zqanswer", "Zqthought"
_NAME, _KEY, _VALUE = "zqname", "zqkey", "zqvalue"
_ARGUMENTS = {_KEY: _VALUE}
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Facts:
    """Probed properties of a template."""

    form: Form
    suffix: str
    """Text that opens an answer."""
    stops: tuple[str, ...]
    """Tokens that end an answer."""
    writes_stop: bool
    """Whether the template writes it after an answer; if not, it begins the next message."""
    call_stop: str = ""
    """Token that ends a message with calls, if it differs."""
    lead: str = ""
    """Text that the model writes before an answer without thinking (a channel, say)."""
    thinking: Block | None = None
    prompt_opens: bool = False
    """Whether the prompt ends inside a thinking block."""
    calls: Block | None = None
    disables_thinking: bool = False


def common(first: str, second: str) -> int:
    """Returns the length of the common prefix of two texts."""
    if second.startswith(first):
        return len(first)
    return next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        len(second),
    )


def border(prompt: str, text: str, names: Sequence[str], most: int | None = None) -> int:
    """Returns where a text with an answer departs from its prompt, never inside ``names``."""
    start = common(prompt, text) if most is None else min(common(prompt, text), most)
    if start == len(prompt):
        return start
    for name in names:
        at = text.find(name, max(0, start - len(name) + 1))
        start = at if 0 <= at < start else start
    return start


def control_names(tokenizer: Tokenizer, special: bool) -> list[str]:
    """Returns the names of special tokens or of all added tokens, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token) for token in added if token.special or not special}
    return sorted((name for name in names if name.strip()), key=len, reverse=True)


def probe(template: TemplateText, tokenizer: Tokenizer, stop: str | None) -> Facts:
    """Returns the properties of a template; raises RendererError if it writes no dialogue."""
    form = _content_form(template)
    question = [plain("user", QUESTION, form)]
    prompt, text = template.render(question, prompt=True), template.render(question)
    answered = template.render([*question, plain("assistant", ANSWER, form)])
    if ANSWER not in answered:
        raise RendererError(
            "renderer_name: the tokenizer's chat template leaves out the answer of a conversation "
            "of one question and one answer; use the renderer of the model's family"
        )
    names = control_names(tokenizer, special=False)
    # The text before the probe answer, after the prompt, is what the model writes first.
    start = border(prompt, answered, names)
    lead, _, tail = answered[start:].partition(ANSWER)
    form, thinking, opened = _thinking(template, form, prompt, lead, names)
    form = _with_calls(template, form)
    called = _call_text(template, form, start)
    found, writes_stop = _stops(template, tokenizer, form, tail, called)
    stops = _given(tokenizer, stop) if stop else found
    # An empty thinking block before the answer is no lead.
    empty = thinking is not None and (opened or lead.strip().startswith(thinking.opening))
    return Facts(
        form=form,
        suffix=prompt[common(prompt, text) :],
        stops=stops,
        writes_stop=any(name in tail for name in stops) if stop else writes_stop,
        call_stop=stops[-1],
        lead="" if empty else lead,
        thinking=thinking,
        prompt_opens=opened,
        calls=_call_block(called),
        disables_thinking=prompt.rstrip().endswith(_THINK_CLOSE),
    )


def _content_form(template: TemplateText) -> Form:
    refusal: Exception | None = None
    for form in (Form(), Form(parts=True)):
        try:
            if QUESTION in template.render([plain("user", QUESTION, form)], prompt=True):
                return form
        except TemplateRefusal as error:
            refusal = refusal or error
    raise RendererError(
        "renderer_name: the tokenizer's chat template does not write a single question "
        f"({refusal or 'its text is missing'}); use the renderer of the model's family"
    ) from refusal


def _thinking(
    template: TemplateText, form: Form, prompt: str, lead: str, names: Sequence[str]
) -> tuple[Form, Block | None, bool]:
    """Returns the form and the block of thinking, and whether the prompt opens it."""
    opened = prompt.rstrip().endswith(_THINK_OPEN)
    answer = plain("assistant", ANSWER, form)
    try:
        field = {**answer, "reasoning_content": THOUGHT, "thinking": THOUGHT}
        text = template.render([plain("user", QUESTION, form), field])
        start = border(prompt, text, names)
        before, found, rest = text[start:].partition(THOUGHT)
        between, answered, _ = rest.partition(ANSWER)
        if found and answered and between.strip():
            opened = opened or (start == len(prompt) and not before.strip())
            return form, _block(before, between, prompt[:start]), opened
    except TemplateRefusal:
        pass
    block = Block(_THINK_OPEN, _THINK_CLOSE)
    known = _THINK_OPEN in template.source and _THINK_CLOSE not in lead
    inline = f"{_THINK_OPEN}{THOUGHT}{_THINK_CLOSE}{ANSWER}"
    try:
        text = template.render([plain("user", QUESTION, form), plain("assistant", inline, form)])
        if known and inline in text:
            return dataclasses.replace(form, thinking="inline"), block, opened
    except TemplateRefusal:
        pass
    # Known but not written: thinking is parsed, and raises an error where it would be trained.
    known = _THINK_OPEN in template.source
    kind = "field" if known else None
    return dataclasses.replace(form, thinking=kind), block if known else None, opened


def _block(before: str, between: str, prompt: str) -> Block:
    """Returns the thinking block from the text around it in an answer."""
    tag = re.search(r"<[^<>\s]+>\s*$", prompt)
    opening = before.strip() or (tag[0].strip() if tag else _THINK_OPEN)
    leading = _blank(before) if before.strip() else ""
    return Block(
        opening,
        between.strip(),
        trim=_blank((before if before.strip() else prompt)[::-1]) + _blank(between),
        before=(leading,) if leading else (),
        after=_blank(between[::-1]),
    )


def _blank(text: str) -> str:
    """Returns the white space at the beginning of a text."""
    return text[: len(text) - len(text.lstrip())]


def _call(form: Form, content: str) -> dict[str, Any]:
    arguments = json.dumps(_ARGUMENTS) if form.arguments == "text" else _ARGUMENTS
    function = {"name": _NAME, "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    return {**plain("assistant", content, form), "tool_calls": [call]}


def _with_calls(template: TemplateText, form: Form) -> Form:
    """Returns the form with that of calls: JSON text if it is verbatim, else objects."""
    kinds: tuple[Literal["text", "object"], ...] = ("text", "object")
    why = "it leaves them out"
    for kind in kinds:
        tried = dataclasses.replace(form, arguments=kind)
        try:
            text = template.render([plain("user", QUESTION, form), _call(tried, "")])
        except TemplateRefusal as error:
            why = str(error.__cause__)
            continue
        # Arguments that are escaped or in Python's spelling are not verbatim.
        quoted = '\\"' in text or f"'{_KEY}'" in text  # JSON in a JSON string; Python's spelling
        if _NAME in text and _KEY in text and _VALUE in text and not quoted:
            return tried
    return dataclasses.replace(form, arguments=None, why_no_calls=why)


def _call_text(template: TemplateText, form: Form, start: int) -> str:
    """Returns what the model writes to call a tool, after some text or without."""
    if form.arguments is None:
        return ""
    for content in (ANSWER, ""):
        try:
            text = template.render([plain("user", QUESTION, form), _call(form, content)])[start:]
        except TemplateRefusal:
            continue
        if _NAME in text:
            return text
    return ""


def _call_block(called: str) -> Block | None:
    before, opened, rest = called.partition(JSON_CALL.opening)
    body, closed, _ = rest.partition(JSON_CALL.closing)
    if not (opened and closed):
        return None
    try:
        found = read_json_call(body)[0].function
    except ValueError:
        return None
    if found.name != _NAME or json.loads(found.arguments) != _ARGUMENTS:
        return None
    blank = _blank(before[::-1])[::-1] if ANSWER in before else ""
    return dataclasses.replace(JSON_CALL, before=(blank,) if blank else ())


def _stops(
    template: TemplateText, tokenizer: Tokenizer, form: Form, tail: str, called: str
) -> tuple[tuple[str, ...], bool]:
    """Returns the tokens that end an answer, and whether the template writes them after it."""
    specials = control_names(tokenizer, special=True)
    first = _first_name(tail, specials) or _first_name(tail, control_names(tokenizer, False))
    if first:
        other = _last_name(called, specials) if called and first not in called else ""
        return (first, other) if other else (first,), True
    following: list[str] = []
    question, answer = plain("user", QUESTION, form), plain("assistant", ANSWER, form)
    result = {**plain("tool", QUESTION, form), "name": _NAME, "tool_call_id": "call00000"}
    then = [[question, answer, question]]
    if form.arguments is not None:
        then.append([question, _call(form, ""), result])
    for conversation in then:
        try:
            written = template.render(conversation[:2])
            rest = template.render(conversation).removeprefix(written)
        except TemplateRefusal:
            continue
        name = next((name for name in specials if rest.startswith(name)), "")
        if name and name not in following:
            following.append(name)
    eos = getattr(tokenizer, "eos_token", None)
    if not following and not eos:
        raise RendererError(
            "template?stop: the chat template writes no control token after an answer, and the "
            "tokenizer has no EOS token; set the stop token: template?stop=<name of a token>"
        )
    return tuple(following) or (str(eos),), False


def _first_name(text: str, names: Sequence[str]) -> str:
    found = [(at, name) for name in names if (at := text.find(name)) >= 0]
    return min(found, key=lambda match: (match[0], -len(match[1])))[1] if found else ""


def _last_name(text: str, names: Sequence[str]) -> str:
    found = [(at, name) for name in names if (at := text.rfind(name)) >= 0]
    return max(found, key=lambda match: (match[0], len(match[1])))[1] if found else ""


def _given(tokenizer: Tokenizer, stop: str) -> tuple[str, ...]:
    names = tuple(stop.split(","))
    for name in names:
        token = tokenizer.convert_tokens_to_ids(name)
        if not isinstance(token, int) or tokenizer.convert_ids_to_tokens(token) != name:
            raise RendererError(
                f"template?stop: got {name!r}, expected the name of one token of the vocabulary, "
                "or several joined by commas"
            )
    return names


def generation_stops(tokenizer: Tokenizer) -> set[int]:
    """Returns the stop ids of the model's generation config, none without the file."""
    path = Path(getattr(tokenizer, "name_or_path", "") or "") / "generation_config.json"
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return set()
    found = ids if isinstance(ids, list) else [ids]
    return {token for token in found if isinstance(token, int)}
