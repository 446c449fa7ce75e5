"""ChatML: ``<|im_start|>role``, a line break, the text, ``<|im_end|>``.

SmolLM2, Qwen and many others use it; ``chatml`` renders plain dialogue for any tokenizer with the
two tokens. Thinking and tools are in the modules of the families.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.checks import text_of
from tinker_cookbook.renderers.core.images import Segment, encode_segments
from tinker_cookbook.renderers.core.messages import Message, Role
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, token_list
from tinker_cookbook.renderers.core.renderer import Renderer

START, END = "<|im_start|>", "<|im_end|>"
SMOLLM2_SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class LineSeparated(Renderer):
    """Format with a line break between messages.

    Templates write one after the last message too. It is never sampled, so it begins the header of
    the next message, and a supervised example ends with the token that ends its last message.
    """

    @abstractmethod
    def _header(self, role: Role) -> str: ...

    def _separator(self, ctx: RenderContext) -> str:
        """Returns the line break after the previous message."""
        return "\n" if ctx.idx else ""

    def _begin(self, role: Role, ctx: RenderContext) -> str:
        """Returns the text before the content of a message of ``role``."""
        return self._separator(ctx) + self._header(role)

    def _get_generation_suffix(self, role: Role, ctx: RenderContext) -> list[int]:
        separator = self.codec.constant(self._separator(ctx))
        return [*separator, *super()._get_generation_suffix(role, ctx)]


class ChatMLBase(LineSeparated):
    """ChatML header and end of a message; subclasses render what is between them."""

    _encodes_with_codec = True
    stop_token = END
    _special_tokens = (START,)
    _inserted_system: str | None = None
    """System prompt of a conversation that does not begin with a system message; None: no system
    message."""

    def _header(self, role: Role) -> str:
        return f"{START}{role}\n"

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        inserted = self._inserted_system
        if inserted is None or (messages and messages[0]["role"] == "system"):
            return []
        return self.codec.constant(f"{START}system\n{inserted}{END}\n")

    def _context(self, header: str, *content: Segment) -> RenderedMessage:
        """Returns a message that the model only reads."""
        # The template encodes header, text and <|im_end|> as one text, except around images. White
        # space at the beginning of the text may merge with the header's line break: the merged
        # token counts as header.
        first, *rest = encode_segments([header, *content, END], self.codec.encode)
        tokens, border = token_list(first), len(self.codec.constant(header))
        return RenderedMessage(header=tokens[:border], output=[tokens[border:], *rest])

    def _answer(self, header: str, text: str, block: str = "") -> RenderedMessage:
        """Returns a message that the model writes: ``block`` and ``text`` after the header."""
        return RenderedMessage(
            header=self.codec.constant(header),
            # Apart from the header, because at inference an answer follows its tokens.
            output=self.codec.encode_after(block, f"{text}{END}"),
        )


@dataclass(eq=False, repr=False, kw_only=True)
class ChatMLRenderer(ChatMLBase):
    """Plain ChatML dialogue with any roles; tools, thinking and media raise RendererError.

    ``default_system`` is inserted where a conversation does not begin with a system message:
    ``None`` means the system prompt of the tokenizer's chat template, ``""`` means none.
    """

    default_system: str | None = None

    _history_as_sampled = True

    def __post_init__(self) -> None:
        super().__post_init__()
        system = self.default_system
        self._inserted_system = (self._template_system() if system is None else system) or None

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns header, text and ``<|im_end|>``."""
        text = text_of(message, ctx.idx, self._name, self.model_name)
        header = self._begin(message["role"], ctx)
        if message["role"] == "assistant":
            return self._answer(header, text)
        return self._context(header, text)

    def _template_system(self) -> str:
        """Returns the system prompt that the tokenizer's chat template inserts by default."""
        if not getattr(self.tokenizer, "chat_template", None):
            return ""
        from jinja2 import TemplateError

        # After one user message, any system prompt in the text is the template's default.
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
