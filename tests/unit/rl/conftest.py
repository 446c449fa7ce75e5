"""A renderer on a tokenizer of bytes, for environments that need no model."""

from __future__ import annotations

import byte_tokenizer
import pytest

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="module")
def bytes_registered():
    with byte_tokenizer.registered():
        yield


@pytest.fixture(scope="module")
def renderer(bytes_registered):
    return get_renderer("role_colon", get_tokenizer(byte_tokenizer.NAME))
