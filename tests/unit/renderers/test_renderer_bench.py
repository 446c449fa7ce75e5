"""The comparison of renderers with spans found by the chat template."""

from __future__ import annotations

import json

import pytest

from benchmarks.renderers import Config, main, make_conversations
from tinker_cookbook.exceptions import ConfigurationError


def test_both_sides_are_measured_on_the_same_conversations(tokenizer_folder, capsys):
    folder = tokenizer_folder("smollm2")
    main(Config(model_name=folder, renderer_name="smollm2", conversations=6, words=5))
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["same_tokens"] == result["conversations"] == 6
    # The template's spans hold the line break behind each of three answers, which no model writes.
    trained = result["trained_tokens"]
    assert trained["template"] - trained["renderer"] == 6 * 3
    assert result["ratio"] > 0
    assert lines[-1] == f"ratio {result['ratio']:.2f}"


def test_conversations_are_those_of_their_seed():
    config = Config(conversations=3)
    first = list(make_conversations(config))
    assert first == list(make_conversations(config))
    assert first != list(make_conversations(Config(conversations=3, seed=1)))
    assert [m["role"] for m in first[0]] == ["user", "assistant"] * 3


def test_bad_sizes_are_named():
    with pytest.raises(ConfigurationError, match="turns: got 0, expected at least 1"):
        Config(turns=0)
