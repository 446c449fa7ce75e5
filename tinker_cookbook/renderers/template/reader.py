"""Reads what a model writes whose format was derived from its chat template."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.streaming import ContentDelta


class TemplateReader(BlockReader):
    """Blocks, behind a constant ``lead`` that the format writes before plain answers."""

    def __init__(self, blocks: Sequence[Block], inside: Block | None, lead: str) -> None:
        super().__init__(blocks, inside)
        self._lead = lead
        self._held = ""

    def feed(self, text: str) -> list[ContentDelta]:
        """Takes more text; the beginning waits while it may be the constant."""
        if not self._lead:
            return super().feed(text)
        self._held += text
        if self._lead.startswith(self._held) and self._held != self._lead:
            return []
        return self._release()

    def finish(self) -> list[ContentDelta]:
        """Text that waited is text."""
        return [*self._release(), *super().finish()]

    def _release(self) -> list[ContentDelta]:
        text, self._held = self._held.removeprefix(self._lead), ""
        self._lead = ""
        return super().feed(text) if text else []
