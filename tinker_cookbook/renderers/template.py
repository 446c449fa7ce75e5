"""Any model with a chat template: the format is derived from the template itself.

``renderer_name=template`` renders conversations with the template that comes with the tokenizer.
What an answer is, is found by rendering the beginnings of the conversation: its prompt is the
template's text of the messages before it with ``add_generation_prompt``, its output is what the
text with the answer has beyond that, up to and with the stop token. Nothing is assumed: where a
template rewrites what was sampled (it drops thinking from history, say), the earlier answer cannot
be trained in that example, and the error says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Example, Renderer
from tinker_cookbook.renderers.content import get_text_content
from tinker_cookbook.renderers.messages import Message, Role, ToolSpec
from tinker_cookbook.renderers.pieces import Piece, flat, join_pieces, spread_weights
from tinker_cookbook.renderers.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.stop_token import special_token_id
from tinker_cookbook.renderers.streaming import MessageReader
from tinker_cookbook.renderers.template_probe import (
    ANSWER,
    QUESTION,
    TemplateReader,
    border,
    common,
    control_names,
    generation_stops,
    probe,
    probe_conversations,
)
from tinker_cookbook.renderers.template_text import (
    Conversation,
    TemplateRefusal,
    TemplateText,
    plain,
)
from tinker_cookbook.renderers.tool_calls import as_openai_tool
from tinker_cookbook.renderers.train_on_what import TrainOnWhat
from tinker_cookbook.tokenizer_utils import Tokenizer, encode_without_special_tokens

logger = logging.getLogger(__name__)

_PLAIN_TEXT_MARK = "\ufdd0"  # of TextCodec.split_control_tokens


@dataclass(frozen=True)
class _Answer:
    """Where an answer stands in the text of the conversation that ends with it."""

    text: str
    """That text up to the end of the answer."""
    start: int
    behind: str
    """The stop token where the template writes none behind the answer."""


class TemplateRenderer(Renderer):
    """The chat template of the tokenizer.

    Options: ``template`` is the name of the template where the tokenizer has several; ``stop``
    names the token that ends an answer (several joined by commas) instead of the one found;
    ``today`` is the day (2026-01-31) for templates that write one, by default the day the renderer
    was made. Every other option is an argument of the template:
    ``template?enable_thinking=false&reasoning_effort=low``.

    Tokens are the template's, but for the border of prompt and answer (see
    :mod:`tinker_cookbook.renderers.base`). Where a template writes no stop token behind an answer
    (GLM-4), the answer at the end of an example has one all the same, or nothing would teach the
    model to stop: the token that begins the next message, else EOS.

    Responses: text; thinking, where the template writes it from ``reasoning_content`` or knows
    ``<think>``; calls, where it writes them as JSON between ``<tool_call>`` tags. Calls in any
    other form stay text. Images are refused.

    Where the prompt is no beginning of the text with the answer (it opens a thinking block that
    the template never writes, say), an answer can be trained as the last of its example, as the
    template writes it; a warning says so.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        stop: str | None = None,
        template: str | None = None,
        today: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self._template = TemplateText(tokenizer, template, today, arguments)
        self._facts = probe(self._template, tokenizer, stop)
        self._stop_ids = [special_token_id(tokenizer, s, "template") for s in self._facts.stops]
        self._written: set[tuple[str, ...]] = set()
        known = generation_stops(tokenizer)
        if known and not known & set(self._stop_ids):
            logger.warning(
                "renderer_name=template: the chat template ends answers with %s, but the model's "
                "generation config stops at token ids %s; template?stop=<token> chooses another",
                ", ".join(self._facts.stops),
                sorted(known),
            )

    def get_stop_sequences(self) -> list[int]:
        """The tokens that the template writes behind an answer."""
        return list(self._stop_ids)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Raises RendererError: a template knows only whole conversations."""
        raise RendererError(
            f"messages[{ctx.idx}]: template cannot render one message alone, because a chat "
            "template knows only whole conversations; use build_generation_prompt or "
            "build_supervised_example"
        )

    def _generation_suffix(self, role: Role) -> list[int]:
        return self.codec.encode(self._facts.suffix)

    def _reader(self) -> MessageReader:
        return TemplateReader(self._facts)

    @property
    def disables_thinking(self) -> bool:
        """Whether the prompt ends with a closed thinking block."""
        return self._facts.disables_thinking

    @property
    def has_extension_property(self) -> bool:
        """Whether it holds, by tokens, for small conversations with and without thinking, with and
        without calls, as far as the template takes them."""
        return self._extends

    @cached_property
    def _extends(self) -> bool:
        held = 0
        for messages in probe_conversations(self._facts):
            try:
                chat = self._chat(messages)
                answers = self._answers(chat, messages)
                pairs = pairwise(sorted(answers))
                if not all(self._follows(chat, answers, *pair) for pair in pairs):
                    return False
                held += 1
            except RendererError:
                continue
        return held > 0

    def _follows(
        self, chat: Conversation, answers: dict[int, _Answer], before: int, after: int
    ) -> bool:
        """Whether the prompt of the later answer begins with the earlier one as it was sampled."""
        sampled = answers[before]
        done = self._tokens(sampled.text + sampled.behind, answers)
        prompt = self._tokens(self._prompt(chat, after), answers)
        first = self._prompt(chat, before)
        continues = sampled.start == len(first) and sampled.text.startswith(first)
        return continues and prompt[: len(done)] == done

    def _chat(self, messages: Sequence[Message]) -> Conversation:
        return Conversation(self._template, self._facts.form, messages)

    def _prompt(self, chat: Conversation, end: int, role: Role = "assistant") -> str:
        """Returns the text after which a message of ``role`` at ``end`` is sampled.

        Some templates take no conversation without a question, and none opens a message of the
        user: there the text before such a message is taken.
        """
        refusal: TemplateRefusal | None = None
        if end and role == "assistant":
            try:
                return chat.prompt(end)
            except TemplateRefusal as error:
                refusal = error
        try:
            text = chat.with_message(end, plain(role, ANSWER, self._facts.form))
        except TemplateRefusal as error:
            raise refusal or error
        head, found, _ = text.partition(ANSWER)
        suffix = self._facts.suffix if role == "assistant" else ""
        at = head.rfind(suffix)
        if not found or at < 0:
            raise refusal or RendererError(
                f"messages: the chat template opens no message of role {role!r} behind "
                f"{end} messages"
            )
        return head[: at + len(suffix)] if suffix else head

    def _answers(self, chat: Conversation, messages: Sequence[Message]) -> dict[int, _Answer]:
        return {
            i: self._answer(chat, i, "tool_calls" in m)
            for i, m in enumerate(messages)
            if m["role"] == "assistant"
        }

    def _answer(self, chat: Conversation, idx: int, calls: bool) -> _Answer:
        prompt, text = self._prompt(chat, idx), chat.text(idx + 1)
        start = len(prompt)
        if not text.startswith(prompt):
            start = self._rewritten_start(chat, idx, prompt, text)
        stop = self._facts.call_stop if calls else self._facts.stops[0]
        if not self._facts.writes_stop:
            return _Answer(text, start, stop)
        ends = [at + len(s) for s in self._facts.stops if (at := text.rfind(s, start)) >= 0]
        end = max(ends, default=len(text))
        return _Answer(text[:end], start, "" if ends else stop)

    def _rewritten_start(self, chat: Conversation, idx: int, prompt: str, text: str) -> int:
        """Returns where an answer begins whose prompt the template does not write before it."""
        bare = chat.with_message(idx, plain("assistant", ANSWER, self._facts.form))
        names = control_names(self.tokenizer, special=False)
        start = border(prompt, bare, names, most=common(text, bare))
        if idx and start < len(chat.text(idx)):
            start = self._behind_suffix(chat, idx, prompt, text[: common(text, bare)])
        self._warn_once(
            f"{self._name}: the chat template writes some answers behind another text than the "
            f"prompt ({prompt[-40:]!r}) from which they are sampled: they are trained as the "
            "template writes them, each as the last answer of its example"
        )
        return start

    def _behind_suffix(self, chat: Conversation, idx: int, prompt: str, head: str) -> int:
        """Returns where an answer begins of which the template rewrites what precedes it: behind
        the last of what opens an answer, before the answer's own text."""
        context = chat.text(idx)
        opening = prompt.removeprefix(context) if prompt.startswith(context) else ""
        at = head.rfind(opening)
        if not opening or at < 0:
            raise RendererError(
                f"messages[{idx}]: the chat template writes the messages before this answer "
                "otherwise once it is there, so no tokens can be said to be the answer's; use the "
                "renderer of the model's family"
            )
        return at + len(opening)

    def _end_in(self, text: str, answer: _Answer, position: int) -> int:
        """Returns where an answer ends in a longer text, -1 where its tokens are not in it."""
        whole = answer.text
        if answer.start < position or not text.startswith(whole):
            return -1
        if not answer.behind:
            return len(whole)
        if len(text) == len(whole):
            return len(whole)
        follows = (s for s in self._facts.stops if text.startswith(s, len(whole)))
        stop = next(follows, None)
        return -1 if stop is None else len(whole) + len(stop)

    def _runs(
        self, text: str, answers: dict[int, _Answer]
    ) -> Iterator[tuple[int, int, int | None]]:
        """Yields begin and end of each run of text that is encoded in one piece, and the message
        of which it is the answer as sampled, None for what stands between answers."""
        position = 0
        for idx, answer in answers.items():
            end = self._end_in(text, answer, position)
            if end >= 0:
                yield position, answer.start, None
                yield answer.start, end, idx
                position = end
        yield position, len(text), None

    def _encode(self, text: str, begins: bool) -> Piece:
        if begins and _PLAIN_TEXT_MARK not in text:  # as the template's own text is encoded
            return encode_without_special_tokens(self.tokenizer, text)
        return self.codec.encode(text)

    def _tokens(self, text: str, answers: dict[int, _Answer]) -> list[Any]:
        return flat(self._text_pieces(text, answers))

    def _text_pieces(self, text: str, answers: dict[int, _Answer]) -> list[Piece]:
        return [self._encode(text[a:b], a == 0) for a, b, _ in self._runs(text, answers)]

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        chat = self._chat(messages)
        self._check_context(chat, messages)
        text = self._prompt(chat, len(messages), role)
        return self._text_pieces(text, self._answers(chat, messages))

    def _example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        chat = self._chat(messages)
        self._check_context(chat, messages)
        text, answers = chat.text(), self._answers(chat, messages)
        everything = what is TrainOnWhat.ALL_TOKENS
        spans = [] if everything else self._context_spans(chat, messages, trained)
        weighted: list[tuple[Piece, float]] = []
        kept: set[int] = set()
        for a, b, idx in self._runs(text, answers):
            if idx is None:
                weighted += self._weigh_context(text, a, b, spans, float(everything))
                continue
            kept.add(idx)
            weighted.append((self._encode(text[a:b], a == 0), float(everything or trained[idx])))
        for idx, answer in answers.items():
            self._check_answer(messages[idx], idx, answer, trained[idx])
            if trained[idx] and idx not in kept and not everything:
                raise RendererError(
                    f"messages[{idx}]: the chat template writes this answer otherwise once the "
                    "conversation goes on, so training it here would teach tokens that are never "
                    "sampled; use build_supervised_examples, which gives each such answer an "
                    "example of its own, or train on the last answer only"
                )
        last = answers.get(len(messages) - 1)
        if last is not None and last.behind:
            weighted.append((self.codec.encode(last.behind), float(everything or trained[-1])))
        return join_pieces([piece for piece, _ in weighted]), spread_weights(weighted)

    def _example_ends(self, messages: Sequence[Message], trained: Sequence[bool]) -> list[int]:
        """Answers share an example where the later prompt begins with the earlier answer."""
        chat = self._chat(messages)
        answers = self._answers(chat, messages)
        ends: list[int] = []
        for idx, answer in answers.items():
            if not trained[idx]:
                continue
            before = answers[ends[-1]] if ends else None
            if before and self._end_in(answer.text[: answer.start], before, 0) >= 0:
                ends.pop()
            ends.append(idx)
        kept = {idx for _, _, idx in self._runs(chat.text(), answers)}
        if len(ends) <= 1 and self.has_extension_property and kept.issuperset(ends):
            return []
        last = max((i for i, chosen in enumerate(trained) if chosen), default=-1)
        return [*ends, last] if last > max(ends, default=-1) else ends

    def _weigh_context(
        self, text: str, begin: int, end: int, spans: Sequence[tuple[int, int]], rest: float
    ) -> Iterator[tuple[Piece, float]]:
        """Yields what stands between answers, encoded in one piece, cut at trained messages."""
        tokens = list(self._encode(text[begin:end], begin == 0))  # pyright: ignore[reportArgumentType]
        done = 0
        for span in spans:
            if begin <= span[0] and span[1] <= end:
                first, last = (len(self._encode(text[begin:at], begin == 0)) for at in span)  # pyright: ignore[reportArgumentType]
                yield tokens[done:first], rest
                yield tokens[first:last], 1.0
                done = last
        yield tokens[done:], rest

    def _context_spans(
        self, chat: Conversation, messages: Sequence[Message], trained: Sequence[bool]
    ) -> list[tuple[int, int]]:
        chosen = [
            i for i, m in enumerate(messages) if trained[i] and m["role"] != "assistant"
        ]
        return sorted(self._context_span(chat, i, messages[i]["role"]) for i in chosen)

    def _context_span(self, chat: Conversation, idx: int, role: Role) -> tuple[int, int]:
        """Returns where the text of a message stands, and the control token that ends it."""
        text, mark = chat.text(), plain(role, QUESTION, self._facts.form)
        before, found, after = chat.with_message(idx, mark, rest=True).partition(QUESTION)
        if not found or not text.startswith(before) or not text[len(before) :].endswith(after):
            raise RendererError(
                f"messages[{idx}]: no tokens can be said to be this message's, because the chat "
                "template writes other messages differently without it; train on answers only"
            )
        end = len(text) - len(after)
        try:
            closing = chat.with_message(idx, mark).partition(QUESTION)[2]
        except TemplateRefusal:
            return len(before), end
        names = control_names(self.tokenizer, special=True)
        ends = [at + len(name) for name in names if (at := closing.find(name)) >= 0]
        closing = closing[: min(ends, default=0)]
        return len(before), end + len(closing) * text.startswith(closing, end)

    def _check_context(self, chat: Conversation, messages: Sequence[Message]) -> None:
        """Refuses messages of roles that the template leaves out; each kind is looked at once."""
        for i, message in enumerate(messages):
            role = message["role"]
            kind = (role, messages[i - 1]["role"] if i else "")
            if role == "assistant" or kind in self._written:
                continue
            mark = plain(role, QUESTION, self._facts.form)
            if QUESTION not in chat.with_message(i, mark, rest=True):
                raise RendererError(
                    f"messages[{i}].role: got {role!r}, which the chat template leaves out, "
                    "expected a role that it writes there; change the role, or use the renderer of "
                    "the model's family"
                )
            self._written.add(kind)

    def _check_answer(self, message: Message, idx: int, answer: _Answer, trained: bool) -> None:
        """Refuses an answer of which the template leaves out what would be trained."""
        content = message["content"]
        written = "".join(answer.text[answer.start :].split())
        text = get_text_content(message)
        wanted = {"content": text if trained else text.rpartition("</think>")[2]}
        if trained and not isinstance(content, str):
            thoughts = (part["thinking"] for part in content if part["type"] == "thinking")
            wanted["content (thinking)"] = "".join(thoughts)
        for call in message.get("tool_calls", []):
            wanted["tool_calls"] = call.function.name
            if wanted["tool_calls"] not in written:
                break
        for field, value in wanted.items():
            if "".join(value.split()) not in written:
                raise RendererError(
                    f"messages[{idx}].{field}: the chat template leaves out {value[:80]!r}, "
                    "expected an answer that it writes as it is; drop that part "
                    "(remove_thinking(content) for thinking), or use the renderer of the model's "
                    "family"
                )

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Declares tools as the template does with ``tools=``: in the text of a system message.

        Raises RendererError for a template that declares them elsewhere.
        """
        form = self._facts.form
        system = [plain("system", system_prompt, form)] if system_prompt else []
        if not tools:
            return [Message(role="system", content=system_prompt)] if system_prompt else []
        question = plain("user", QUESTION, form)
        declared = self._template.render(
            [*system, question], prompt=True, tools=[as_openai_tool(tool) for tool in tools]
        )
        marked = self._template.render([plain("system", ANSWER, form), question], prompt=True)
        before, _, after = marked.partition(ANSWER)
        text = declared.removeprefix(before).removesuffix(after)
        prefix = [plain("system", text, form), question]
        names = [as_openai_tool(tool)["function"]["name"] for tool in tools]
        again = self._template.render(prefix, prompt=True)
        if again != declared or not all(name in text for name in names):
            raise RendererError(
                "tools: this model's chat template does not declare tools in the system message, "
                "from which they could be taken; describe the tools in a system message of your "
                "own, or use the renderer of the model's family"
            )
        return [Message(role="system", content=text)]
