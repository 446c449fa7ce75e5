"""Renderers on real tokenizers, and small ways to write files of conversations."""

from __future__ import annotations

import json

import pytest

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="session")
def make_renderer(tokenizer_folder):
    """``make_renderer("qwen3", "qwen3")``: a renderer by name on a family's tokenizer."""
    return lambda name, family: get_renderer(name, get_tokenizer(tokenizer_folder(family)))


@pytest.fixture
def write_jsonl(tmp_path):
    """Writes rows (or lines as they are) to a file and returns its path."""

    def write(*rows, name="rows.jsonl"):
        lines = [
            row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows
        ]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write
