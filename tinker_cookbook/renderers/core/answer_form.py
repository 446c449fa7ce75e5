"""The parts of an answer in a chat format, for constrained sampling.

A grammar has to know what is sampled around the text of an answer: thinking, headers, and the form
of a tool call.
"""

from __future__ import annotations

from dataclasses import dataclass


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
