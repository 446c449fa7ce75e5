"""A conversation as a model sees it: tokens, weights, prompt, what is read back.

``python -m tinker_cookbook.renderers.show`` prints it; ``show`` returns it.
"""

from __future__ import annotations

from tinker_cookbook.renderers.show.command import ShowConfig, main, show

__all__ = ["ShowConfig", "main", "show"]
