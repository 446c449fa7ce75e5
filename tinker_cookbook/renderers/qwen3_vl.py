"""Qwen3-VL: its renderers are in the module of Qwen3's."""

from __future__ import annotations

from tinker_cookbook.renderers.qwen3 import (
    AROUND_IMAGE,
    Qwen3VLInstructRenderer,
    Qwen3VLRenderer,
    check_system_is_first,
)

__all__ = ["AROUND_IMAGE", "Qwen3VLInstructRenderer", "Qwen3VLRenderer", "check_system_is_first"]
