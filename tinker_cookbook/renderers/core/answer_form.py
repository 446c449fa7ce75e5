"""The parts of an answer in a chat format, for constrained sampling.

A grammar has to know what is sampled around the text of an answer: thinking, headers, and the form
of a tool call.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_cookbook.renderers.core.blocks import BlockReader
from tinker_cookbook.renderers.core.parsing import MessageReader
from tinker_cookbook.renderers.core.tool_calls import read_json_call


@dataclass(frozen=True)
class CallForm:
    """How a chat format writes tool calls whose arguments are one JSON object.

    The calls of an answer are ``begin``, the calls with ``separator`` between them, and ``end``. A
    call is ``before``, the name, ``between``, the arguments, ``after``.
    """

    before: str
    between: str
    after: str = ""
    begin: str = ""
    end: str = ""
    separator: str | None = ""
    """None: an answer has one call at most."""
    marker: str = ""
    """Text by which a call is recognised wherever it is in an answer. Empty: the whole answer is
    the call, and text does not begin with a brace."""


HERMES_CALLS = CallForm(
    before='<tool_call>\n{"name": "',
    between='", "arguments": ',
    after="}\n</tool_call>",
    separator="\n",
    marker="<tool_call>",
)
"""Calls as JSON between ``<tool_call>`` tags."""


@dataclass(frozen=True)
class AnswerForm:
    """What the model samples: thinking, then text or calls.

    ``thinking`` is the text around thinking, None without it; ``opened``: the prompt has opened it,
    so that the answer has to close it. ``after_thinking`` are characters that may follow it.
    ``text`` precedes the text of an answer. ``calls`` is None where they have no form with JSON.
    """

    thinking: tuple[str, str] | None = None
    opened: bool = False
    after_thinking: str = ""
    text: str = ""
    calls: CallForm | None = None


def answer_form_of(reader: MessageReader, calls: CallForm | None, thinks: bool) -> AnswerForm:
    """Returns the form that the blocks of ``reader`` show; ``thinks``: the model thinks itself."""
    if not isinstance(reader, BlockReader):
        return AnswerForm(calls=calls)
    if calls is None and any(block.read is read_json_call for block in reader.blocks):
        calls = HERMES_CALLS
    blocks = (reader.inside, *reader.blocks)
    thinking = next((block for block in blocks if block is not None and block.read is None), None)
    if thinking is None or not thinks:
        return AnswerForm(calls=calls)
    tags = thinking.opening, thinking.closing
    return AnswerForm(tags, reader.inside is thinking, thinking.after, calls=calls)
