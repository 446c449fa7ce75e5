"""Renderer of any tokenizer's own chat template."""

from __future__ import annotations

from tinker_cookbook.renderers.template.renderer import TemplateRenderer

__all__ = ["TemplateRenderer"]
