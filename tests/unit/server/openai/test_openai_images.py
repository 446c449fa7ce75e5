"""Images through the official SDK, and in chat and responses, to a Qwen3-VL of random weights."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import openai
import pytest
import tinker
from PIL import Image
from tinker import types

from tinker_cookbook.image_processing_utils import get_image_processor, image_to_data_uri
from tinker_cookbook.renderers import get_renderer, image_to_chunk
from tinker_cookbook.tokenizer_utils import get_tokenizer

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

        def log_message(self, format, *args):
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


def ask_with(url):
    part = {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]


def test_chat_and_responses_see_the_image(oai, sdk, oai_serving, seeing_model, site, picture):
    """Greedy answers are those to the renderer's prompt, and usage has its length."""
    renderer = get_renderer(
        VL["renderer_name"], get_tokenizer(seeing_model), get_image_processor(seeing_model)
    )
    image = {"type": "image", "image": str(picture)}
    text = {"type": "text", "text": "What?"}
    prompt = renderer.build_generation_prompt([{"role": "user", "content": [image, text]}])
    params = types.SamplingParams(max_tokens=6, temperature=0)
    sampler = sdk.create_sampling_client(base_model=seeing_model)
    expected = [
        f"token_id:{one}" for one in sampler.sample(prompt, 1, params).result().sequences[0].tokens
    ]
    names = {**VL, "return_tokens_as_token_ids": True}
    ask = {"model": seeing_model, "max_tokens": 6, "temperature": 0, "logprobs": True}
    urls = image_to_data_uri(picture), f"{site}/a.png", str(picture), picture.as_uri()
    for url in urls:
        found = oai.chat.completions.create(messages=ask_with(url), **ask, extra_body=names)
        assert [one.token for one in found.choices[0].logprobs.content] == expected
        assert found.usage.prompt_tokens == prompt.length
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = oai.chat.completions.create(
        messages=ask_with(urls[1]), **ask, **options, extra_body=VL
    )
    assert last.usage.prompt_tokens == prompt.length
    parts = [{"type": "input_image", "image_url": urls[1]}, {"type": "input_text", "text": "What?"}]
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": parts}
    for items, more in (
        ([{"role": "user", "content": parts}], 0),
        ([{"role": "user", "content": "Look."}, call, result], 20),
    ):
        answer = oai.responses.create(
            model=seeing_model, input=items, max_output_tokens=4, temperature=0, extra_body=VL
        )
        assert answer.usage.input_tokens >= prompt.length + more
    until = time.monotonic() + 60
    # The log is written every half second.
    while "responses" not in (log := (oai_serving.root / "server" / "access.log").read_text()):
        assert time.monotonic() < until
        time.sleep(0.1)
    line = json.loads([line for line in log.splitlines() if "chat/completions" in line][-1])
    assert (line["tokens_in"], line["tokens_out"]) == (prompt.length, 6)
    for content in (site.removeprefix("http://"), picture.name, "base64"):
        assert content not in log + "\n".join(oai_serving.said[20:])


def data_of(width, height):
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


REFUSED = {
    "http://example.com/a.png": "does not read images from example.com",
    "SITE/to-private": "127.0.0.2",
    "SITE/to-file": "scheme 'file'",
    "/etc/passwd": "does not read images from this file",
    "data:text/html,x": "expected a data URI such as 'data:image/png",
    "data:image/svg+xml,<svg/>": "cannot be read as an image",
    "data:image/png;base64,&&": "not valid base64",
    data_of(2000, 1001): "has 2000 x 1001 pixels, expected at most 2000000 pixels",
    data_of(20_000, 2): "refuses 20000 x 2 pixels",
    "": "expected a URL such as data:image/png",
}


def test_images_that_are_not_read_name_the_part(oai, seeing_model, stories_model, site, picture):
    cases = [(ask_with(url.replace("SITE", site)), said) for url, said in REFUSED.items()]
    for part in ({"type": "image", "image": "/etc/passwd"}, {"type": "image_url", "file_id": "f"}):
        said = "got file_id" if "file_id" in part else "type 'image', expected text or image_url"
        cases.append(([{"role": "user", "content": [part]}], said))
    known = ask_with(image_to_data_uri(picture))
    for messages, said in [*cases, (known, "cannot write a part of type 'image'")]:
        model, more = (seeing_model, VL) if messages is not known else (stories_model, {})
        with pytest.raises(openai.BadRequestError) as error:
            oai.chat.completions.create(model=model, messages=messages, extra_body=more)
        body = error.value.response.json()["error"]
        assert said in body["message"], body
        assert body["type"] == "invalid_request_error"
        assert body["param"].startswith("messages[0].content"), body
    with pytest.raises(openai.BadRequestError, match="return_token_ids: got images"):
        oai.chat.completions.create(
            model=seeing_model, messages=known, extra_body={**VL, "return_token_ids": True}
        )
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "ftp://x/y"}]}]
    with pytest.raises(openai.BadRequestError, match="scheme 'ftp'") as error:
        oai.responses.create(model=seeing_model, input=items, extra_body=VL)
    assert error.value.response.json()["error"]["param"] == "input[0].content[0]"
