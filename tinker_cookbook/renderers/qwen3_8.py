"""Qwen3.8: Qwen3.6 with a reasoning effort in the system message, and thinking kept in history.

The system message begins with a sentence on the effort (none for ``medium`` or without thinking);
a conversation without a system message gets one of that sentence. All answers keep their thinking,
as by default in the template.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tinker_cookbook.exceptions import RendererError, nearest
from tinker_cookbook.renderers.core.checks import TEXT, check_parts
from tinker_cookbook.renderers.core.messages import Message, get_text_content
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.qwen3_5 import Qwen3_5DisableThinkingRenderer, Qwen3_5Renderer

REASONING_EFFORT_INSTRUCTIONS = {
    "xhigh": "Reasoning effort is set to xhigh. Please think carefully through the task, validate "
    "key assumptions, consider plausible alternatives, and prioritize correctness, consistency, "
    "and clarity in the final answer.",
    "medium": "",
    "low": "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly "
    "to the conclusion without unnecessary elaboration.",
}


@dataclass(eq=False, repr=False, kw_only=True)
class Qwen3_8Renderer(Qwen3_5Renderer):  # noqa: N801 - the model's name has the number
    """Qwen3.8 with a reasoning effort of ``xhigh``, ``medium`` or ``low``.

    ``strip_thinking_from_history=True`` drops the thinking of answers before the last question, as
    the template with ``preserve_thinking=false``. Tags in a string are text, not thinking.
    """

    reasoning_effort: str = "xhigh"
    strip_thinking_from_history: bool = False
    json_scalars: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        efforts = REASONING_EFFORT_INSTRUCTIONS
        if self.reasoning_effort not in efforts:
            raise RendererError(
                "Unexpected reasoning effort. reasoning_effort: got "
                f"{self.reasoning_effort!r}, expected one of {', '.join(efforts)}"
                f"{nearest(self.reasoning_effort, efforts)}"
            )
        # Medium effort has no sentence, and thinking that is disabled has no effort.
        self._effort = "" if self.disables_thinking else efforts[self.reasoning_effort]
        self._inserted_system = self._effort or None

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the tokens of a message; a system message begins with the effort."""
        if message["role"] != "system" or ctx.idx:
            return super().render_message(message, ctx)
        check_parts(message, ctx.idx, self._name, TEXT, self.model_name)
        whole = self._system_text(message)
        if not whole:  # the template leaves out an empty system message
            return RenderedMessage(output=[])
        return super().render_message(Message(**{**message, "content": whole}), ctx)

    def _system_text(self, message: Message) -> str:
        texts = (self._effort, get_text_content(message).strip())
        return "\n\n".join(text for text in texts if text)

    def _separator(self, ctx: RenderContext) -> str:
        before = ctx.prev_message
        # An empty system message is left out, so this message is the first.
        if before is not None and ctx.idx == 1 and before["role"] == "system":
            return "\n" if self._system_text(before) else ""
        return super()._separator(ctx)

    def _split_thinking(self, message: Message, keeps: bool) -> tuple[str, str]:
        # Tags in a string are text here, unlike in Qwen3.5.
        if isinstance(message["content"], str):
            return "", message["content"].strip()
        return super()._split_thinking(message, keeps)


class Qwen3_8DisableThinkingRenderer(  # noqa: N801 - as above
    Qwen3_5DisableThinkingRenderer, Qwen3_8Renderer
):
    """Qwen3.8 without thinking."""
