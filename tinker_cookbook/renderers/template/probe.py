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
from typing import Any, Literal

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.messages import Message, TextPart, ThinkingPart, ToolCall
from tinker_cookbook.renderers.core.tool_calls import JSON_CALL, read_json_call
from tinker_cookbook.renderers.template.text import Form, TemplateRefusal, TemplateText, plain
from tinker_cookbook.tokenizer_utils import Tokenizer

QUESTION, ANSWER = "Zqquestion", "Zqanswer"
_THOUGHT, _NAME, _KEY, _VALUE = "Zqthought", "zqname", "zqkey", "zqvalue"
_ID = "call00000"
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
    """Text that the model writes before an answer without thinking (for example a channel)."""
    thinking: Block | None = None
    prompt_opens: bool = False
    """Whether the prompt ends inside a thinking block."""
    calls: Block | None = None
    disables_thinking: bool = False


def common(first: str, second: str) -> int:
    """Returns the length of the common prefix of two texts."""
    # The usual case, without a loop over characters.
    if second.startswith(first):
        return len(first)
    return next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        len(second),
    )


def departure(prompt: str, text: str, names: Sequence[str], most: int | None = None) -> int:
    """Returns where a text with an answer departs from its prompt, never inside ``names``."""
    start = common(prompt, text) if most is None else min(common(prompt, text), most)
    if start == len(prompt):
        return start
    # Two control tokens may begin alike; the texts then depart before the token, not inside it.
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
    start = departure(prompt, answered, names)
    lead, _, tail = answered[start:].partition(ANSWER)
    # Thinking and calls have several forms; the first that the template writes is used.
    form, thinking, opened = _thinking(template, form, prompt, lead, names)
    form, called = _calls(template, form, start)
    if not stop:
        stops, writes_stop = _stops(template, tokenizer, form, tail, called)
    else:
        stops = tuple(stop.split(","))
        for name in stops:
            token = tokenizer.convert_tokens_to_ids(name)
            if not isinstance(token, int) or tokenizer.convert_ids_to_tokens(token) != name:
                raise RendererError(
                    f"template?stop: got {name!r}, expected the name of one token of the "
                    "vocabulary, or several joined by commas"
                )
        writes_stop = any(name in tail for name in stops)
    # An empty thinking block before the answer does not count as a lead.
    empty = thinking is not None and (opened or lead.strip().startswith(thinking.opening))
    return Facts(
        form=form,
        # What the prompt has beyond the conversation opens an answer.
        suffix=prompt[common(prompt, text) :],
        stops=stops,
        writes_stop=writes_stop,
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
            # The error reports the refusal of the first form.
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
    question = plain("user", QUESTION, form)
    # First form: a field of the message. What the template writes around it is the block.
    try:
        # Templates differ in the name of the field; gpt-oss's is ``thinking``.
        fields = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        text = template.render([question, plain("assistant", ANSWER, form) | fields])
        start = departure(prompt, text, names)
        before, found, rest = text[start:].partition(_THOUGHT)
        between, answered, _ = rest.partition(ANSWER)
        # Without text between thinking and answer there is no closing tag to parse.
        if found and answered and between.strip():
            # Thinking directly after the prompt: the prompt has opened the block.
            opened = opened or (start == len(prompt) and not before.strip())
            # Without an opening tag in the answer it is the last tag of the prompt.
            tag = re.search(r"<[^<>\s]+>\s*$", prompt[:start])
            opening = before.strip() or (tag[0].strip() if tag else _THINK_OPEN)
            leading = _blank(before) if before.strip() else ""
            block = Block(
                opening,
                between.strip(),
                trim=_blank((before if before.strip() else prompt[:start])[::-1]) + _blank(between),
                before=(leading,) if leading else (),
                after=_blank(between[::-1]),
            )
            return form, block, opened
    except TemplateRefusal:
        pass
    if _THINK_OPEN not in template.source:
        return dataclasses.replace(form, thinking=None), None, opened
    # Second form: tags in the text, if the template writes them as they are.
    block, inline = Block(_THINK_OPEN, _THINK_CLOSE), f"<think>{_THOUGHT}</think>{ANSWER}"
    try:
        text = template.render([question, plain("assistant", inline, form)])
        if _THINK_CLOSE not in lead and inline in text:
            return dataclasses.replace(form, thinking="inline"), block, opened
    except TemplateRefusal:
        pass
    # Known but not written: thinking is parsed, and raises an error where it would be trained.
    return form, block, opened


def _blank(text: str) -> str:
    """Returns the white space at the beginning of a text."""
    return text[: len(text) - len(text.lstrip())]


def _call(form: Form, content: str) -> dict[str, Any]:
    arguments: Any = {_KEY: _VALUE}
    arguments = json.dumps(arguments) if form.arguments == "text" else arguments
    call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": arguments}}
    return {**plain("assistant", content, form), "tool_calls": [call]}


def _calls(template: TemplateText, form: Form, start: int) -> tuple[Form, str]:
    """Adds the format of calls to the form; returns both the form and the text of a tool call."""
    kinds: tuple[Literal["text", "object"], ...] = ("text", "object")
    question = plain("user", QUESTION, form)
    why = "it leaves them out"
    # Text first: it keeps the model's spelling, so a sampled call renders to the same tokens.
    for kind in kinds:
        tried = dataclasses.replace(form, arguments=kind)
        try:
            text = template.render([question, _call(tried, "")])
        except TemplateRefusal as error:
            why = str(error.__cause__)
            continue
        # JSON in a JSON string and Python's spelling are not verbatim.
        quoted = '\\"' in text or f"'{_KEY}'" in text
        if _NAME in text and _KEY in text and _VALUE in text and not quoted:
            break
    else:
        return dataclasses.replace(form, arguments=None, why_no_calls=why), ""
    # The model may write some text before the call.
    for content in (ANSWER, ""):
        try:
            text = template.render([question, _call(tried, content)])[start:]
        except TemplateRefusal:
            continue
        if _NAME in text:
            return tried, text
    return tried, ""


def _call_block(called: str) -> Block | None:
    """Returns the block of calls if they are JSON between ``<tool_call>`` tags."""
    before, opened, rest = called.partition(JSON_CALL.opening)
    body, closed, _ = rest.partition(JSON_CALL.closing)
    if not (opened and closed):
        return None
    try:
        found = read_json_call(body)[0].function
    except ValueError:
        return None
    # JSON of another form between these tags could not be parsed.
    if found.name != _NAME or json.loads(found.arguments) != {_KEY: _VALUE}:
        return None
    # White space between text and call belongs to the format, not to the text.
    blank = _blank(before[::-1])[::-1] if ANSWER in before else ""
    return dataclasses.replace(JSON_CALL, before=(blank,) if blank else ())


def _stops(
    template: TemplateText, tokenizer: Tokenizer, form: Form, tail: str, called: str
) -> tuple[tuple[str, ...], bool]:
    """Returns the tokens that end an answer, and whether the template writes them after it."""
    specials = control_names(tokenizer, special=True)
    # The first control token after the answer; of several at one position the longest.
    for names in (specials, control_names(tokenizer, special=False)):
        ends = [(at, -len(name), name) for name in names if (at := tail.find(name)) >= 0]
        if not ends:
            continue
        first = min(ends)[2]
        last = [(at, len(name), name) for name in specials if (at := called.rfind(name)) >= 0]
        # A message with calls may end with another control token.
        other = max(last)[2] if last and first not in called else ""
        return (first, other) if other else (first,), True
    # The template writes none, so the token that begins the next message ends the answer.
    following: list[str] = []
    question, answer = plain("user", QUESTION, form), plain("assistant", ANSWER, form)
    result = {**plain("tool", QUESTION, form), "name": _NAME, "tool_call_id": _ID}
    then = [[question, answer, question]]
    # A tool result follows calls, and may begin with another token than a question.
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


def probe_conversations(facts: Facts) -> list[list[Message]]:
    """Returns small conversations of several turns, with and without thinking and calls."""
    question = Message(role="user", content="Why?")
    answer = Message(role="assistant", content="Because.")
    thought = ThinkingPart(type="thinking", thinking="Hm.")
    parts = [thought, TextPart(type="text", text="Because.")]
    # Tags in the text: templates may drop thinking in this form from history, too.
    tagged = "<think>\nHm.\n</think>\n\nBecause."
    kinds = [answer, *(Message(role="assistant", content=content) for content in (parts, tagged))]
    # Several turns, because templates may rewrite an answer once it is history.
    turns = [[question, kind, question, kind, question, kind] for kind in kinds]
    if facts.form.arguments is not None:
        function = ToolCall.FunctionBody(name="look", arguments='{"q": "x"}')
        calls = [ToolCall(function=function, id=_ID)]
        result = Message(role="tool", content="y", name="look", tool_call_id=_ID)
        for kind in (Message(role="assistant", content=""), *kinds):
            calling = Message(**{**kind, "tool_calls": calls})
            turns.append([question, calling, result, answer, question, answer])
            turns.append([question, calling, result, calling, result, kind, question, answer])
    return turns
