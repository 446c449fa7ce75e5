"""Any model with a chat template: the format is derived from the template itself.

``renderer_name=template`` renders conversations with the tokenizer's own template. The prompt of an
answer is the template's text of the messages before it with ``add_generation_prompt``; its output
is the rest of the text with the answer, up to and with the stop token. Where a template rewrites
what was sampled (for example drops thinking from history), the earlier answer cannot be trained in
that example, and the error states it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.image_processing_utils import ImageSource
from tinker_cookbook.model_info import other_renderer
from tinker_cookbook.renderers.base import Example, Renderer
from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.images import image_text_processor, image_to_chunk
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolSpec,
    ensure_list,
    system_message,
)
from tinker_cookbook.renderers.core.parsing import ContentDelta, MessageReader, special_token_id
from tinker_cookbook.renderers.core.rendered import (
    Piece,
    RenderContext,
    RenderedMessage,
    TrainOnWhat,
    flat,
    join_weighted,
    runs_of,
    with_last_trained,
)
from tinker_cookbook.renderers.core.thinking import check_leading
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool
from tinker_cookbook.renderers.template.probe import (
    ANSWER,
    QUESTION,
    control_names,
    probe,
    probe_conversations,
)
from tinker_cookbook.renderers.template.text import TemplateText, plain
from tinker_cookbook.renderers.template.transcript import Answer, Transcript
from tinker_cookbook.tokenizer_utils import Tokenizer, encode_without_special_tokens


class TemplateReader(BlockReader):
    """Parser of blocks after a constant ``lead``, which the format writes before plain answers."""

    def __init__(self, blocks: Sequence[Block], inside: Block | None, lead: str) -> None:
        super().__init__(blocks, inside)
        self._lead = lead
        self._held = ""

    def feed(self, text: str) -> list[ContentDelta]:
        """Parses more text; the beginning is buffered while it may be ``lead``."""
        if not self._lead:
            return super().feed(text)
        self._held += text
        if self._lead.startswith(self._held) and self._held != self._lead:
            return []
        text = self._held.removeprefix(self._lead)
        # The format writes the lead once, at the beginning.
        self._held = self._lead = ""
        return super().feed(text) if text else []

    def finish(self) -> list[ContentDelta]:
        """Flushes the buffer as text."""
        held, self._held, self._lead = self._held, "", ""
        return [*(super().feed(held) if held else []), *super().finish()]


class Images(NamedTuple):
    """Images of a conversation, in order, and what the template writes for each."""

    mark: str = ""
    chunks: tuple[Any, ...] = ()

    def pieces(self, items: Sequence[Any]) -> list[Piece]:
        """Returns the pieces of a run of tokens and images."""
        return runs_of(items) if self.chunks else [items]


class TemplateRenderer(Renderer):
    """The chat template of the tokenizer.

    Options: ``template`` is the name of one of several templates; ``stop`` is the token that ends
    an answer (several joined by commas), by default the probed one; ``today`` is the date
    (2026-01-31) in templates with one, by default the current one. Every other option is an
    argument of the template: ``template?enable_thinking=false&reasoning_effort=low``.

    Tokens are the template's, except at the border of prompt and answer (see
    :mod:`tinker_cookbook.renderers.base`). If a template writes no stop token after an answer
    (GLM-4), the answer at the end of an example still has one, so that the model learns to stop:
    the token that begins the next message, otherwise EOS.

    Responses are parsed into text, thinking (if the template writes ``reasoning_content`` or has
    ``<think>``) and calls (if it writes them as JSON between ``<tool_call>`` tags). Other calls
    remain text.

    An image is where the template writes the mark of the model's processor, and has as many tokens
    as the processor makes of it, after resizing to ``max_image_size`` pixels at its longest side.

    Where the text with an answer does not begin with its prompt (for example a prompt that opens
    a thinking block, which the template never writes), only the last answer of an example can be
    trained, as the template writes it, with a warning.
    """

    _encodes_with_codec = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        stop: str | None = None,
        template: str | None = None,
        today: str | None = None,
        max_image_size: int | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self._template = TemplateText(tokenizer, template, today, arguments)
        self._facts = probe(self._template, tokenizer, stop)
        self.disables_thinking = self._facts.disables_thinking
        self._stop_ids = [special_token_id(tokenizer, s) for s in self._facts.stops]
        self._max_image_size = max_image_size
        self._written: set[tuple[str, str]] = set()
        self._answers: dict[bytes, Answer] = {}
        # The longest first, so that a token is not mistaken for one that is its end.
        self._controls = tuple(control_names(tokenizer, special=True))

    def get_stop_sequences(self) -> list[int]:
        """Returns the tokens that end an answer."""
        return list(self._stop_ids)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Raises RendererError: a template renders only whole conversations."""
        raise RendererError(
            f"messages[{ctx.idx}]: template cannot render one message alone, because a chat "
            "template renders only whole conversations; use build_generation_prompt or "
            "build_supervised_example"
        )

    def _generation_suffix(self, role: Role) -> list[int]:
        return self.codec.encode(self._facts.suffix)

    def _reader(self) -> MessageReader:
        facts = self._facts
        blocks = [block for block in (facts.thinking, facts.calls) if block is not None]
        return TemplateReader(blocks, facts.thinking if facts.prompt_opens else None, facts.lead)

    @property
    def has_extension_property(self) -> bool:
        """Whether it holds for probe conversations with and without thinking and calls."""
        return self._extends

    @cached_property
    def _extends(self) -> bool:
        held = 0
        for messages in probe_conversations(self._facts):
            try:
                chat = self._transcript(messages)
                # Without the position of an answer its tokens cannot be compared.
                if chat.lost:
                    return False
                for before, after in pairwise(chat.answers):
                    sampled, first = chat.answers[before], chat.prompt_before(before)
                    # The answer must follow the prompt from which it is sampled.
                    if sampled.start != len(first) or not sampled.text.startswith(first):
                        return False
                    # The later prompt must begin with the earlier answer as it was sampled. Compare
                    # tokens, since equal text may be encoded differently.
                    done = flat(self._text_pieces(chat, sampled.text + sampled.missing_stop))
                    prompt = flat(self._text_pieces(chat, chat.prompt_before(after)))
                    if prompt[: len(done)] != done:
                        return False
                held += 1
            except RendererError:  # the template rejects calls or thinking
                continue
        # A template that rejects every probe has shown nothing.
        return held > 0

    def _transcript(self, messages: Sequence[Message]) -> Transcript:
        for where, _ in _image_parts(messages)[:1]:
            try:
                image_text_processor(self)
            except RendererError as error:
                other = other_renderer(self.model_name, "template", images=True)
                cure = f"; renderer_name: got 'template', {other}" if other else ""
                raise RendererError(f"{where}: {error}{cure}") from error
        return Transcript(
            self._template, self._facts, messages, self.tokenizer, self._warn_once, self._answers
        )

    def _images(self, messages: Sequence[Message], text: str) -> Images:
        """Returns the images of a conversation, whose text is ``text``."""
        parts = _image_parts(messages)
        if not parts:
            return Images()
        processor, chunks = image_text_processor(self), []
        for where, image in parts:
            try:
                chunks.append(image_to_chunk(image, processor, self._max_image_size))
            except RendererError as error:
                raise RendererError(f"{where}: {error}") from error
        mark = processor.mark
        if (count := text.count(mark)) != len(parts):
            raise RendererError(
                f"messages: the chat template writes the mark {mark!r} {count} times for "
                f"{len(parts)} images; use the renderer of the model's family"
            )
        return Images(mark, tuple(chunks))

    def _encode(self, text: str, begin: int, end: int) -> Sequence[int]:
        """Returns the tokens of a run of text as the continuation of the text before it."""
        run = text[begin:end]
        # The beginning of the text is encoded as by the tokenizer itself.
        if not (begin or self.codec.is_marked(run)):
            return encode_without_special_tokens(self.tokenizer, run)
        # SentencePiece vocabularies put a space after control tokens: the one before the run is
        # encoded with it and cut off again.
        if run and text.endswith(self._controls, 0, begin):
            name = next(name for name in self._controls if text.endswith(name, 0, begin))
            return self.codec.encode(name + run)[1:]
        return self.codec.encode(run)

    def _items(self, text: str, begin: int, end: int, images: Images) -> Sequence[Any]:
        """Returns the tokens of a run of text, and the images in it."""
        if not images.chunks:
            return self._encode(text, begin, end)
        items: list[Any] = []
        for chunk in images.chunks[text.count(images.mark, 0, begin) :]:
            if (at := text.find(images.mark, begin, end)) < 0:
                break
            items += [*self._encode(text, begin, at), chunk]
            begin = at + len(images.mark)
        return [*items, *self._encode(text, begin, end)]

    def _text_pieces(
        self, chat: Transcript, text: str, images: Images | None = None
    ) -> list[Piece]:
        images = images or Images()
        runs = (self._items(text, a, b, images) for a, b, _ in chat.runs(text))
        return [piece for items in runs for piece in images.pieces(items)]

    def _prompt_pieces(self, messages: Sequence[Message], role: Role) -> list[Piece]:
        chat = self._transcript(messages)
        # Otherwise a message that the template leaves out would be missing without an error.
        chat.check_context(self._written)
        text = chat.prompt_before(len(messages), role)
        return self._text_pieces(chat, text, self._images(messages, text))

    def _example(
        self, messages: Sequence[Message], trained: Sequence[bool], what: TrainOnWhat
    ) -> Example:
        chat = self._transcript(messages)
        chat.check_context(self._written)
        text, everything = chat.example_text(), what is TrainOnWhat.ALL_TOKENS
        images = self._images(messages, text)
        runs = list(chat.runs(text))
        kept = {idx for _, _, idx in runs}
        for idx in chat.answers:
            if trained[idx] and not everything and self._facts.form.thinking != "inline":
                check_leading(messages[idx], idx, "the chat template")
            chat.check_answer(idx, trained[idx])
            # all_tokens trains the template's text as it is, rewritten answers included.
            if trained[idx] and idx not in kept and not everything:
                raise RendererError(
                    f"messages[{idx}]: the chat template writes this answer differently when the "
                    "conversation continues, so it would be trained on tokens that are never "
                    "sampled; use build_supervised_examples, which returns a separate example "
                    "for each such answer, or train on the last answer only"
                )
        for idx, message in enumerate(messages if not everything else ()):
            if trained[idx] and message["role"] != "assistant":
                raise RendererError(
                    f"messages[{idx}]: template trains answers, or everything (all_tokens), but "
                    f"train_on_what={what.value} selects a message of role {message['role']!r}; "
                    "use the renderer of the model's family"
                )
        for idx, error in chat.lost.items():
            if trained[idx] and not everything:
                raise error
        weighted = [
            (
                self._items(text, begin, end, images),
                float(everything or (idx is not None and trained[idx])),
            )
            for begin, end, idx in runs
        ]
        # The last answer has no next message whose first token could end it.
        final = chat.answers.get(len(messages) - 1)
        if final is not None and final.missing_stop:
            stop = self.codec.encode(final.missing_stop)
            weighted.append((stop, float(everything or trained[-1])))
        return join_weighted([(one, w) for items, w in weighted for one in images.pieces(items)])

    def _example_ends(
        self, messages: Sequence[Message], trained: Sequence[bool], merge: bool
    ) -> list[int]:
        """Merged answers share an example where the later prompt begins with the earlier one."""
        chat = self._transcript(messages)
        ends: list[int] = []
        for idx, answer in chat.answers.items():
            if not trained[idx]:
                continue
            before = chat.answers[ends[-1]] if ends and merge else None
            # The prompt of this answer contains the earlier one as it was sampled, so one example
            # trains both.
            if before and chat.end_in(answer.text[: answer.start], before) >= 0:
                ends.pop()
            ends.append(idx)
        kept = {idx for _, _, idx in chat.runs(chat.text())}
        if len(ends) <= 1 and self.has_extension_property and kept.issuperset(ends):
            return []
        return with_last_trained(ends, trained)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Declares tools in a system message, as the template does with ``tools=``.

        Raises RendererError for a template that declares them elsewhere.
        """
        form = self._facts.form
        system = [plain("system", system_prompt, form)] if system_prompt else []
        if not tools:
            return system_message(system_prompt)
        question = plain("user", QUESTION, form)
        declared = self._template.render(
            [*system, question], prompt=True, tools=[as_openai_tool(tool) for tool in tools]
        )
        # A probe word in a system message shows where the template writes its text.
        marked = self._template.render([plain("system", ANSWER, form), question], prompt=True)
        before, _, after = marked.partition(ANSWER)
        # Remove what the template writes around the text of a system message.
        text = declared.removeprefix(before).removesuffix(after)
        prefix = [plain("system", text, form), question]
        names = [as_openai_tool(tool)["function"]["name"] for tool in tools]
        # Check that the text as a system message renders to the same tokens.
        again = self._template.render(prefix, prompt=True)
        if again != declared or not all(name in text for name in names):
            raise RendererError(
                "tools: this model's chat template does not declare tools in the system message, "
                "from which they could be taken; describe the tools in your own system "
                "message, or use the renderer of the model's family"
            )
        return [Message(role="system", content=text)]


def _image_parts(messages: Sequence[Message]) -> list[tuple[str, ImageSource]]:
    """Returns the images of a conversation, each with its place."""
    return [
        (f"messages[{i}].content[{j}]", part["image"])
        for i, message in enumerate(messages)
        for j, part in enumerate(ensure_list(message["content"]))
        if part["type"] == "image"
    ]
