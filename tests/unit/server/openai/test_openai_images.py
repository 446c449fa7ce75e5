"""Images through the official SDK, and in chat and responses, to a Qwen3-VL of random weights."""

from __future__ import annotations

import io
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import tinker
from PIL import Image
from tinker import types

from tinker_cookbook.image_processing_utils import get_image_processor, image_to_data_uri
from tinker_cookbook.renderers import image_to_chunk

VL = {"renderer_name": "qwen3_vl_instruct"}
TEXT = [types.EncodedTextChunk(tokens=[40, 41, 42])]


@pytest.fixture(scope="module")
def sdk(oai_serving):
    service = tinker.ServiceClient(base_url=oai_serving.url, api_key=oai_serving.key())
    yield service
    service.holder.close()


@pytest.fixture(scope="module")
def picture(seeing_model):
    return Path(seeing_model) / "picture.png"


@pytest.fixture(scope="module")
def site(picture):
    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            to = {"/to-private": "http://127.0.0.2/", "/to-file": "file:///etc/passwd"}
            self.send_response(302 if self.path in to else 200)
            if self.path in to:
                self.send_header("Location", to[self.path])
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            self.wfile.write(picture.read_bytes())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_sdk_samples_and_trains_on_images(sdk, seeing_model, picture):
    """A pointer and the image itself are the same prompt; another image is another one."""
    known = image_to_chunk(picture, get_image_processor(seeing_model))
    other = io.BytesIO()
    Image.radial_gradient("L").resize((48, 32)).save(other, "PNG")
    chunks = {
        "image": known,
        "uncounted": types.ImageChunk(data=known.data, format="png"),
        "file": types.ImageAssetPointerChunk(location=str(picture), format="png"),
        "data": types.ImageAssetPointerChunk(location=image_to_data_uri(picture), format="png"),
        "other": types.ImageChunk(data=other.getvalue(), format="png"),
    }
    prompts = {
        name: types.ModelInput(chunks=[*TEXT, chunk, *TEXT]) for name, chunk in chunks.items()
    }
    sampler = sdk.create_sampling_client(base_model=seeing_model)
    params = types.SamplingParams(max_tokens=4, temperature=0)
    found = {
        name: sampler.sample(prompt, 1, params, include_prompt_logprobs=True).result()
        for name, prompt in prompts.items()
    }
    scores = {name: np.array(one.prompt_logprobs[-2:]) for name, one in found.items()}
    length = 6 + known.length
    for name, one in found.items():
        assert len(one.prompt_logprobs) == length
        assert np.allclose(scores[name], scores["image"], atol=1e-6) == (name != "other")
    trainer = sdk.create_lora_training_client(base_model=seeing_model, rank=4)
    weights = np.r_[np.zeros(2 + known.length), np.ones(3)].astype(np.float32)
    targets = np.r_[np.zeros(2 + known.length), 40, 41, 42].astype(np.int64)
    datum = types.Datum(
        model_input=types.ModelInput(
            chunks=[*TEXT, known, types.EncodedTextChunk(tokens=[40, 41])]
        ),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    passed = trainer.forward_backward([datum], "cross_entropy").result()
    logprobs = passed.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(logprobs[-2:], scores["image"], atol=1e-4)
    assert (
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"] > 0
    )
