"""Model inputs from recorded tokens."""

from __future__ import annotations

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.record.episodes import Tokens
from tinker_cookbook.record.schema import IMAGE
from tinker_cookbook.utils.imports import tinker


def model_input(tokens: Tokens) -> tinker.ModelInput:
    """Returns recorded tokens [T] as a model input; raises ``DataError`` for images."""
    if (tokens == IMAGE).any():
        raise DataError("the record has no images, only digests, so this cannot be replayed")
    return tinker.ModelInput.from_ints(tokens.tolist())
