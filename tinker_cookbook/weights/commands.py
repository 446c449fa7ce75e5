"""The commands ``export``, ``merge``, ``card`` and ``publish``."""

from __future__ import annotations

from tinker_cookbook.weights.settings import ExportSettings

__all__ = ["ExportSettings"]
