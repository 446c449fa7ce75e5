"""ChatML: ``<|im_start|>role``, a line break, the text, ``<|im_end|>``.

SmolLM2, Qwen and many others use it; ``chatml`` renders plain dialogue for any tokenizer with the
two tokens. Thinking and tools are in the modules of the families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.checks import text_of
from tinker_cookbook.renderers.core.images import Segment, encode_segments
from tinker_cookbook.renderers.core.messages import Message, Role
from tinker_cookbook.renderers.core.parsing import special_token_id
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, token_list
from tinker_cookbook.tokenizer_utils import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
SMOLLM2_SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatMLBase(Renderer):
    """ChatML header and end of a message; subclasses render what is between them."""

    _encodes_with_codec = True
    stop_token = END

    def __init__(self, tokenizer: Tokenizer, image_processor: Any = None) -> None:
        super().__init__(tokenizer, image_processor)
        # Raises for a vocabulary without ChatML tokens, which would spell them as text.
        special_token_id(tokenizer, START, type(self).__name__)

    def _generation_suffix(self, role: Role) -> list[int]:
        return self.codec.constant(f"{START}{role}\n")

    def _context(self, header: str, *content: Segment) -> RenderedMessage:
        """Returns a message that the model only reads, encoded in one piece as by the template."""
        # White space at the beginning of the text may merge with the header's line break: the
        # merged token counts as header.
        segments = [header, *content, END]
        # The template encodes header, text and <|im_end|> as one text, except around images.
        first, *rest = encode_segments(segments, self.codec.encode)
        tokens, border = token_list(first), len(self.codec.constant(header))
        return RenderedMessage(
            header=tokens[:border],
            output=[tokens[border:], *rest],
            footer=self.codec.constant("\n"),
        )

    def _answer(self, header: str, text: str, block: str = "") -> RenderedMessage:
        """Returns a message that the model writes: ``block`` and ``text`` after the header."""
        return RenderedMessage(
            header=self.codec.constant(header),
            output=self.codec.encode_behind(block, f"{text}{END}"),
            footer=self.codec.constant("\n"),
        )


class ChatMLRenderer(ChatMLBase):
    """Plain ChatML dialogue with any roles; tools, thinking and media raise RendererError.

    ``default_system`` is inserted where a conversation does not begin with a system message:
    ``None`` means the system prompt of the tokenizer's own chat template, ``""`` means none.
    """

    _history_as_sampled = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: Any = None,
        *,
        default_system: str | None = None,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self._default_system = (
            self._inserted_system_prompt() if default_system is None else default_system
        )

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns header, text and ``<|im_end|>``; the line break after it is the footer."""
        text = text_of(message, ctx.idx, self._name)
        header = f"{START}{message['role']}\n"
        if message["role"] == "assistant":
            return self._answer(header, text)
        return self._context(header, text)

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        if not self._default_system or not messages or messages[0]["role"] == "system":
            return []
        return self.codec.constant(f"{START}system\n{self._default_system}{END}\n")

    def _inserted_system_prompt(self) -> str:
        """Returns the system prompt that the tokenizer's chat template inserts by default."""
        if not getattr(self.tokenizer, "chat_template", None):
            return ""
        from jinja2 import TemplateError

        probe = [{"role": "user", "content": "x"}]
        try:
            text = str(self.tokenizer.apply_chat_template(probe, tokenize=False))
        except (TemplateError, ValueError, TypeError) as error:
            raise RendererError(
                "default_system: the tokenizer's chat template fails on one user message "
                f"({error}); give the default system prompt yourself: chatml?default_system= "
                "for none"
            ) from error
        # Only a system message at the very beginning is one that the template inserted.
        before, opened, prompt = text.partition(f"{START}system\n")
        return prompt.partition(END)[0] if opened and not before else ""


def smollm2(
    tokenizer: Tokenizer,
    image_processor: Any = None,
    *,
    default_system: str = SMOLLM2_SYSTEM_PROMPT,
) -> ChatMLRenderer:
    """Returns ChatML with the default system prompt of SmolLM2's template."""
    return ChatMLRenderer(tokenizer, image_processor, default_system=default_system)
