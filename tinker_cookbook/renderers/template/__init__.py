"""The universal renderer: any tokenizer's own chat template, incrementally and checked."""

from __future__ import annotations

from tinker_cookbook.renderers.template.renderer import TemplateRenderer

__all__ = ["TemplateRenderer"]
