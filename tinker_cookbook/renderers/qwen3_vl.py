"""Qwen3-VL: its renderers stand beside those of Qwen3."""

from __future__ import annotations

from tinker_cookbook.renderers.qwen3 import (
    AROUND_IMAGE,
    Qwen3VLInstructRenderer,
    Qwen3VLRenderer,
    check_system_is_first,
)

__all__ = ["AROUND_IMAGE", "Qwen3VLInstructRenderer", "Qwen3VLRenderer", "check_system_is_first"]
