"""Images through the local clients, as the SDK's chunks."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import tinker
from PIL import Image
from tinker import types
from tiny_vlm import tiny_vlm

from tinker_cookbook.backends.local import LocalServiceClient
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataValidationError,
)

TEXT = types.EncodedTextChunk(tokens=[5, 6, 302])
END = types.EncodedTextChunk(tokens=[303, *range(7, 18)])


def png(width: int = 64, height: int = 40) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def image(data: bytes | None = None, expected: int | None = 8) -> types.ImageChunk:
    return types.ImageChunk(data=data or png(), format="png", expected_tokens=expected)


def datum(*chunks: tinker.ModelInputChunk) -> tinker.Datum:
    """Trains the last three tokens."""
    length = sum(chunk.length for chunk in chunks)
    weights = np.zeros(length, np.float32)
    weights[-3:] = 1
    return tinker.Datum(
        model_input=tinker.ModelInput(chunks=list(chunks)),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.full(length, 7)),
            "weights": tinker.TensorData.from_numpy(weights),
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("vlm"), "qwen3_vl")


@pytest.fixture
def service(tmp_path: Path):
    store = CheckpointStore(tmp_path / "home")
    with LocalServiceClient(Engine("cpu", "float32"), store) as service:
        yield service


def test_training_and_sampling(service, folder, tmp_path):
    """Also with an adapter on the vision tower, which is saved, described and resumed."""
    client = service.create_lora_training_client(str(folder), 4, seed=1, train_vision=True)
    example = datum(TEXT, image(), END)
    sampler = client.save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput(chunks=[TEXT, image(), END])
    params = types.SamplingParams(max_tokens=4, temperature=0)
    before = sampler.sample(prompt, 1, params).result().sequences[0]
    losses = []
    for _ in range(3):  # the features that the sampler computed are not those that are trained
        losses.append(client.forward_backward([example], "cross_entropy").result().metrics)
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    assert losses[2]["loss:sum"] < losses[0]["loss:sum"]
    path = client.save_state("a").result().path
    info = service.create_rest_client().get_weights_info_by_tinker_path(path).result()
    assert info.train_vision
    resumed = service.create_training_client_from_state_with_optimizer(path)
    passes = [c.forward_backward([example], "cross_entropy").result() for c in (client, resumed)]
    assert passes[0].metrics == passes[1].metrics
    # A pointer to the same file is the same image; an older sampler has the older features.
    (tmp_path / "image.png").write_bytes(png())
    where = str(tmp_path / "image.png")
    pointer = types.ImageAssetPointerChunk(location=where, format="png", expected_tokens=8)
    by_pointer = tinker.ModelInput(chunks=[TEXT, pointer, END])
    again = sampler.sample(by_pointer, 1, params).result()
    assert again.sequences[0].logprobs == before.logprobs
    assert again.prompt_cache_hit_tokens == 22  # all but the last of 23
    scores = sampler.compute_logprobs(prompt).result()
    assert [score is None for score in scores] == [True] + [False] * 2 + [True] * 8 + [False] * 12


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (types.EncodedTextChunk(tokens=[1 << 62]), "holds token id 4611686018427387904"),
        (image(expected=9), "expected_tokens is 9, but the image has 8 tokens"),
        (image(png()[:200]), "cannot be read|truncated|damaged"),
        (image(b"<svg></svg>"), "chunk 1"),
        (image(png(1000, 2)), "refuses 1000 x 2 pixels"),
        (
            types.ImageAssetPointerChunk(location="/none.png", format="png", expected_tokens=8),
            "none.png.*cannot be opened",
        ),
    ],
)
def test_bad_images_are_refused_before_any_compute(service, folder, chunk, message):
    client = service.create_lora_training_client(str(folder), 4)
    with pytest.raises(DataValidationError, match=message) as caught:
        client.forward_backward([datum(TEXT, chunk, END)], "cross_entropy").result()
    assert str(caught.value).startswith("datum 0: model_input: chunk 1")
    sampler = service.create_sampling_client(base_model=str(folder))
    with pytest.raises(DataValidationError, match=message) as caught:
        sampler.sample(tinker.ModelInput(chunks=[TEXT, chunk, END]), 1).result()
    assert str(caught.value).startswith("prompt: chunk 1")


def test_text_models_refuse_images_and_vision_adapters(service, stories_model, folder):
    client = service.create_lora_training_client(stories_model, 4)
    with pytest.raises(ConfigurationError, match="is a text model"):
        client.forward_backward([datum(TEXT, image(), END)], "cross_entropy").result()
    with pytest.raises(ConfigurationError, match="train_vision=true, but this model has no vision"):
        service.create_lora_training_client(stories_model, 4, train_vision=True).get_info()
