"""Renderers on the real tokenizers, made once."""

from __future__ import annotations

import pytest
from mistral_cases import renderers, stand_in  # noqa: F401 - fixtures of two test files

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="session")
def make_renderer(tokenizer_folder):
    """``make_renderer("qwen3?…", "qwen3")``: a renderer by spec on a family's tokenizer."""
    made = {}

    def make(spec, family):
        if (spec, family) not in made:
            tokenizer = get_tokenizer(tokenizer_folder(family))
            made[spec, family] = get_renderer(spec, tokenizer)
        return made[spec, family]

    return make
