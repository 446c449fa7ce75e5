"""The parts of an answer in a chat format, for constrained sampling.

A grammar has to know what is sampled around the text of an answer: thinking, headers, and the form
of a tool call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tinker_cookbook.renderers.core.blocks import BlockReader
from tinker_cookbook.renderers.core.parsing import MessageReader
from tinker_cookbook.renderers.core.tool_calls import read_json_call, read_xml_call


@dataclass(frozen=True)
class ArgumentForm:
    """How a chat format writes arguments one by one.

    An argument is ``before``, its name, ``between``, its value, ``after``. Strings are bare, other
    values JSON.
    """

    before: str
    between: str
    after: str
    marks: tuple[str, ...]
    """Texts that a bare string cannot contain, because they would end it."""
    string_between: str
    """``between`` of strings; where it is the same, the format has no types."""
    python_words: bool = False
    """Whether True, False and None may have Python's spelling."""

    @property
    def typed(self) -> bool:
        """Whether an argument states if it is a string."""
        return self.between != self.string_between


@dataclass(frozen=True)
class CallForm:
    """How a chat format writes tool calls.

    The calls of an answer are ``begin``, the calls with ``separator`` between them, and ``end``. A
    call is ``before``, the name, ``number``, ``between``, the arguments, ``call_id``, ``after``.
    """

    before: str
    between: str
    after: str = ""
    begin: str = ""
    end: str = ""
    separator: str | None = ""
    """None: an answer has one call at most."""
    number: str = ""
    call_id: str = ""
    """Like ``number`` a regular expression between slashes, or nothing."""
    arguments: ArgumentForm | None = None
    """None: the arguments are one JSON object."""
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

XML_CALLS = CallForm(
    before="<tool_call>\n<function=",
    between=">\n",
    after="</function>\n</tool_call>",
    separator="\n",
    arguments=ArgumentForm(
        before="<parameter=",
        between=">\n",
        after="\n</parameter>\n",
        marks=("</parameter>", "</function>", "</tool_call>"),
        string_between=">\n",
        python_words=True,
    ),
    marker="<tool_call>",
)
"""Calls as XML between ``<tool_call>`` tags."""


@dataclass(frozen=True)
class AnswerForm:
    """What the model samples: thinking, then text or calls.

    ``thinking`` is the text around thinking, None without it; ``opened``: the prompt has opened it,
    so that the answer has to close it. ``after_thinking`` are characters that may follow it.
    ``leading`` are characters that may precede the rest, and ``text`` precedes the text of an
    answer. ``calls`` is None where the form of calls is not known.
    """

    thinking: tuple[str, str] | None = None
    opened: bool = False
    after_thinking: str = ""
    leading: str = ""
    text: str = ""
    calls: CallForm | None = None


def answer_form_of(reader: MessageReader, calls: CallForm | None, thinks: bool) -> AnswerForm:
    """Returns the form that the blocks of ``reader`` show; ``thinks``: the model thinks itself."""
    if not isinstance(reader, BlockReader):
        return AnswerForm(calls=calls)
    for block in reader.blocks:
        if calls is None and block.read is read_json_call:
            calls = HERMES_CALLS
        elif calls is None and block.read is read_xml_call:
            calls = replace(XML_CALLS, end=block.after)
    blocks = (reader.inside, *reader.blocks)
    thinking = next((block for block in blocks if block is not None and block.read is None), None)
    if thinking is None or not thinks:
        return AnswerForm(calls=calls)
    tags = thinking.opening, thinking.closing
    return AnswerForm(tags, reader.inside is thinking, thinking.after, calls=calls)
