"""Positions of the messages of a conversation in the text of its chat template.

An answer is the difference of two renderings: the text with it minus its prompt, up to and with the
stop token. Whether a longer text contains it in that form is checked, not assumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.messages import Message, Role, get_text_content
from tinker_cookbook.renderers.template.probe import (
    ANSWER,
    QUESTION,
    Facts,
    common,
    control_names,
    departure,
)
from tinker_cookbook.renderers.template.text import (
    TemplateRefusal,
    TemplateText,
    as_template_message,
    plain,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

_CACHED = 4096  # answers; each has the text of its conversation


@dataclass(frozen=True)
class Answer:
    """Position of an answer in the text of the conversation that ends with it."""

    text: str
    """That text up to the end of the answer."""
    start: int
    missing_stop: str
    """Stop token, if the template writes none after the answer."""


class Transcript:
    """Conversation in the template's form, with the positions of its answers.

    ``warn`` receives the differences from sampling. ``cache`` holds the answers of earlier
    conversations by a digest of them, so that a growing conversation needs renderings of its last
    answer only.
    """

    def __init__(
        self,
        template: TemplateText,
        facts: Facts,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        warn: Callable[[str], None],
        cache: dict[bytes, Answer],
    ) -> None:
        self._template, self._facts, self._messages = template, facts, messages
        self._tokenizer, self._warn = tokenizer, warn
        # JSON text, which is hashable: renderings are cached by it.
        self._keys = tuple(
            _key(as_template_message(message, facts.form, i)) for i, message in enumerate(messages)
        )
        self.answers: dict[int, Answer] = {}
        """Answers with a known position, by the index of the message."""
        self.lost: dict[int, RendererError] = {}
        """Answers without a known position, with the error for training on them."""
        digest = blake2b()
        for idx, message in enumerate(messages):
            digest.update(self._keys[idx].encode())
            if message["role"] == "assistant":
                answer = cache.get(digest.digest())
                try:
                    self.answers[idx] = answer or self._locate(idx, "tool_calls" in message)
                    if len(cache) > _CACHED:
                        cache.clear()
                    cache[digest.digest()] = self.answers[idx]
                # Only an answer that is trained needs its position, so this is not an error yet.
                except RendererError as error:
                    self.lost[idx] = error

    def text(self, end: int | None = None) -> str:
        """Returns the text of the first ``end`` messages, of all of them for None."""
        return self._template.render_keys(self._keys[:end])

    def example_text(self) -> str:
        """Returns the text of all messages, without white space after the token that ends them."""
        text = self.text()
        ended = text.rstrip()
        return ended if ended.endswith(tuple(self._facts.stops)) else text

    def _with_message(self, end: int, message: Mapping[str, Any]) -> str:
        """Returns the text of the first ``end`` messages and ``message``."""
        return self._template.render_keys((*self._keys[:end], _key(message)))

    def _with_text(self, idx: int, text: str) -> str:
        """Returns the text, where message ``idx`` is replaced by ``text``."""
        message = json.loads(self._keys[idx])
        message |= plain(message["role"], text, self._facts.form)
        keys = (*self._keys[:idx], _key(message), *self._keys[idx + 1 :])
        return self._template.render_keys(keys)

    def prompt_before(self, end: int, role: Role = "assistant") -> str:
        """Returns the text after which a message of ``role`` at ``end`` is sampled."""
        # Some templates reject a conversation without a question, and none has a prompt for a user
        # message: there it is the text before such a message.
        refusal: TemplateRefusal | None = None
        if end and role == "assistant":
            try:
                return self._template.render_keys(self._keys[:end], True)
            except TemplateRefusal as error:
                refusal = error
        try:
            # The text before a probe message is the prompt.
            text = self._with_message(end, plain(role, ANSWER, self._facts.form))
        except TemplateRefusal as error:
            raise (refusal or error) from error
        head, found, _ = text.partition(ANSWER)
        suffix = self._facts.suffix if role == "assistant" else ""
        # Cut after the opening of an answer: a lead after it is sampled by the model.
        at = head.rfind(suffix)
        if not found or at < 0:
            raise refusal or RendererError(
                f"messages: the chat template opens no message of role {role!r} after "
                f"{end} messages"
            )
        return head[: at + len(suffix)] if suffix else head

    def _locate(self, idx: int, calls: bool) -> Answer:
        prompt, text = self.prompt_before(idx), self.text(idx + 1)
        start = len(prompt)
        if not text.startswith(prompt):
            start = self._rewritten_start(idx, prompt, text)
        stop = self._facts.call_stop if calls else self._facts.stops[0]
        # The token that begins the next message ends this answer; the last answer needs it added.
        if not self._facts.writes_stop:
            return Answer(text, start, stop)
        ends = [at + len(s) for s in self._facts.stops if (at := text.rfind(s, start)) >= 0]
        end = max(ends, default=len(text))
        return Answer(text[:end], start, "" if ends else stop)

    def _rewritten_start(self, idx: int, prompt: str, text: str) -> int:
        """Returns the start of an answer that does not follow its prompt in the text."""
        # A plain answer in this position shows where the template begins answers.
        bare = self._with_message(idx, plain("assistant", ANSWER, self._facts.form))
        names = control_names(self._tokenizer, special=False)
        start = departure(prompt, bare, names, most=common(text, bare))
        context = self.text(idx) if idx else ""
        if start < len(context):
            # The template rewrites the context too: take the last opening of an answer before the
            # answer's own text.
            opening = prompt.removeprefix(context) if prompt.startswith(context) else ""
            at = text[: common(text, bare)].rfind(opening)
            if not opening or at < 0:
                raise RendererError(
                    f"messages[{idx}]: the chat template writes the messages before this answer "
                    "differently when it follows, so the tokens of the answer are not known; use "
                    "the renderer of the model's family"
                )
            start = at + len(opening)
        self._warn(
            "the chat template writes some answers after a different text than the prompt "
            f"({prompt[-40:]!r}) from which they are sampled: they are trained as the template "
            "writes them, each as the last answer of its example"
        )
        return start

    def end_in(self, text: str, answer: Answer, position: int = 0) -> int:
        """Returns the end of an answer after ``position`` in a longer text; -1 where the text does
        not contain it as it was sampled."""
        end = len(answer.text)
        # The template has rewritten the answer, so its tokens are not those that were sampled.
        if answer.start < position or not text.startswith(answer.text):
            return -1
        if not answer.missing_stop or end == len(text):
            return end
        # The template writes no stop: the token that begins the next message ends the answer.
        stop = next((s for s in self._facts.stops if text.startswith(s, end)), None)
        return -1 if stop is None else end + len(stop)

    def runs(self, text: str) -> Iterator[tuple[int, int, int | None]]:
        """Yields start and end of each run of text that is encoded in one piece, with the index of
        its answer, None between answers."""
        position = 0
        for idx, answer in self.answers.items():
            end = self.end_in(text, answer, position)
            # Prompt and answer are separate runs, because the model continues after the prompt's
            # tokens.
            if end >= 0:
                yield position, answer.start, None
                yield answer.start, end, idx
                position = end
        yield position, len(text), None

    def check_context(self, written: set[tuple[str, str]]) -> None:
        """Raises RendererError for a role that the template leaves out; ``written`` caches checked
        kinds."""
        for i, message in enumerate(self._messages):
            role = message["role"]
            kind = (role, self._messages[i - 1]["role"] if i else "")
            # One check for each pair of a role and the role before it; answers have check_answer.
            if role == "assistant" or kind in written:
                continue
            if QUESTION not in self._with_text(i, QUESTION):
                raise RendererError(
                    f"messages[{i}].role: got {role!r}, which the chat template leaves out, "
                    "expected a role that it writes there; change the role, or use the renderer of "
                    "the model's family"
                )
            written.add(kind)

    def check_answer(self, idx: int, trained: bool) -> None:
        """Raises RendererError if the template leaves out text or calls of an answer, or thinking
        of a trained one."""
        message, answer = self._messages[idx], self.answers[idx]
        content = message["content"]
        # Compared without white space, which a template may strip.
        written = "".join(answer.text[answer.start :].split())
        text = get_text_content(message)
        # The template may drop thinking in the text of history.
        wanted = [("content", text if trained else text.rpartition("</think>")[2])]
        if trained and not isinstance(content, str):
            thoughts = (part["thinking"] for part in content if part["type"] == "thinking")
            wanted.append(("content (thinking)", "".join(thoughts)))
        # Names only: a template that takes objects spells the arguments itself.
        wanted += [("tool_calls", call.function.name) for call in message.get("tool_calls", [])]
        for field, value in wanted:
            if "".join(value.split()) not in written:
                raise RendererError(
                    f"messages[{idx}].{field}: the chat template leaves out {value[:80]!r}, "
                    "expected an answer that it writes as it is; drop that part "
                    "(remove_thinking(content) for thinking), or use the renderer of the model's "
                    "family"
                )


def _key(message: Mapping[str, Any]) -> str:
    return json.dumps(dict(message), ensure_ascii=False)
