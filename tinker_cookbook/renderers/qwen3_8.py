"""Qwen3.8: Qwen3.6 with a reasoning effort in the system message, and thinking kept in history.

The system message begins with a sentence on the effort (none for ``medium`` or without thinking);
a conversation without a system message gets one of that sentence. All answers keep their thinking,
as by default in the template.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.exceptions import RendererError, nearest
from tinker_cookbook.renderers.core.chatml import END, START
from tinker_cookbook.renderers.core.checks import check_parts
from tinker_cookbook.renderers.core.images import ImageProcessorProtocol
from tinker_cookbook.renderers.core.messages import Message, get_text_content
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.qwen3_5 import Qwen3_5DisableThinkingRenderer, Qwen3_5Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

REASONING_EFFORT_INSTRUCTIONS = {
    "xhigh": "Reasoning effort is set to xhigh. Please think carefully through the task, validate "
    "key assumptions, consider plausible alternatives, and prioritize correctness, consistency, "
    "and clarity in the final answer.",
    "medium": "",
    "low": "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly "
    "to the conclusion without unnecessary elaboration.",
}


class Qwen3_8Renderer(Qwen3_5Renderer):  # noqa: N801 - the model's name has the number
    """Qwen3.8 with a reasoning effort of ``xhigh``, ``medium`` or ``low``.

    ``strip_thinking_from_history=True`` drops the thinking of answers before the last question, as
    the template with ``preserve_thinking=false``. Tags in a string are text, not thinking.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: ImageProcessorProtocol | None = None,
        *,
        reasoning_effort: str = "xhigh",
        strip_thinking_from_history: bool = False,
        merge_text_chunks: bool = True,
        max_image_size: int = 0,
    ) -> None:
        if reasoning_effort not in REASONING_EFFORT_INSTRUCTIONS:
            raise RendererError(
                f"Unexpected reasoning effort. reasoning_effort: got "
                f"{reasoning_effort!r}, expected one of "
                f"{', '.join(REASONING_EFFORT_INSTRUCTIONS)}"
                f"{nearest(reasoning_effort, REASONING_EFFORT_INSTRUCTIONS)}"
            )
        super().__init__(
            tokenizer,
            image_processor,
            strip_thinking_from_history=strip_thinking_from_history,
            merge_text_chunks=merge_text_chunks,
            json_scalars=True,
            max_image_size=max_image_size,
        )
        self._effort = (
            "" if self.disables_thinking else REASONING_EFFORT_INSTRUCTIONS[reasoning_effort]
        )

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; a system message begins with the effort."""
        if message["role"] != "system" or ctx.idx:
            return super().render_message(message, ctx)
        check_parts(message, ctx.idx, self._name, frozenset({"text"}))
        texts = (self._effort, get_text_content(message).strip())
        whole = "\n\n".join(text for text in texts if text)
        if not whole:  # the template leaves out an empty system message
            return RenderedMessage(output=[])
        return super().render_message(Message(**{**message, "content": whole}), ctx)

    def _conversation_prefix(self, messages: Sequence[Message]) -> list[int]:
        if not self._effort or (messages and messages[0]["role"] == "system"):
            return []
        return self.codec.constant(f"{START}system\n{self._effort}{END}\n")

    def _split_thinking(self, message: Message, ctx: RenderContext) -> tuple[str, str]:
        if isinstance(message["content"], str):
            return "", message["content"].strip()
        return super()._split_thinking(message, ctx)


class Qwen3_8DisableThinkingRenderer(  # noqa: N801 - as above
    Qwen3_5DisableThinkingRenderer, Qwen3_8Renderer
):
    """Qwen3.8 without thinking."""
