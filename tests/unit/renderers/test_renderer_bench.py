"""The comparison of renderers with spans found by the chat template."""

from __future__ import annotations

import json

from benchmarks.renderers import Config, main


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
