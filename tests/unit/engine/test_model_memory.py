"""Several base models in one engine: what they take, and what does not fit."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import engine_reference as ref
import pytest
import torch

from tinker_cookbook.engine import engine as engine_module
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.model import base_model
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.loading import weights_bytes
from tinker_cookbook.exceptions import OutOfMemoryError

SECONDS = 60


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_size_is_that_of_the_weights(tmp_path, kind):
    """Qwen's unembedding is its embedding: the engine holds that matrix twice."""
    from transformers import AutoModelForCausalLM

    folder = ref.make_model(kind, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    if kind == "qwen3":
        count += model.get_input_embeddings().weight.numel()
    assert weights_bytes(folder, torch.float32) == 4 * count
    assert weights_bytes(folder, torch.bfloat16) == 2 * count


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({}, {"": torch.device("cuda:1")}),
        ({"base_dtype": "nf4"}, None),
        ({"sharding": object()}, None),
    ],
)
def test_only_a_plain_model_is_loaded_straight_to_the_card(tiny_base, monkeypatch, settings, where):
    """A quantised or sharded one may not fit the card in full precision."""
    from transformers import AutoModelForCausalLM

    folder = tiny_base("llama").folder

    class LoadedError(Exception):
        pass

    def load(folder: Path, **arguments: Any) -> None:
        assert arguments.get("device_map") == where
        raise LoadedError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    # Needs no package for this.
    monkeypatch.setattr(base_model, "quantized_layout", lambda base_dtype: None)
    with pytest.raises(LoadedError):
        BaseModel("x", folder, torch.device("cuda:1"), torch.bfloat16, **settings)


def test_a_second_model_is_weighed_before_it_is_loaded(
    stories_model, tmp_path, monkeypatch, caplog
):
    second = str(shutil.copytree(stories_model, tmp_path / "second"))
    engine = Engine("cpu", "float32")
    free = [0]
    monkeypatch.setattr(engine_module, "free_memory_bytes", lambda _: free[0])
    engine.submit(engine.base_model, stories_model).result(SECONDS)  # alone it is not judged
    with pytest.raises(OutOfMemoryError) as raised:
        engine.submit(engine.base_model, second).result(SECONDS)
    said = str(raised.value)
    for part in (second, stories_model, "0.0 MiB are free", "smaller model", "dtype=bfloat16"):
        assert part in said
    assert list(engine._models) == [Path(stories_model).resolve()]
    free[0] = 1 << 40
    with caplog.at_level(logging.INFO):
        engine.submit(engine.base_model, second).result(SECONDS)
        engine.submit(engine.base_model, second).result(SECONDS)
    lines = [line for line in caplog.messages if line.startswith("Base models on cpu:")]
    assert len(lines) == 1
    assert second in lines[0]
    assert stories_model in lines[0]
    engine.close()
