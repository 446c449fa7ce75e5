"""Every family of vision-language models from data to a merged model (about 20 s)."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from homes import new_home
from PIL import Image
from tiny_vlm import tiny_vlm

from recipes import sl_basic
from tinker_cookbook.backends import connect
from tinker_cookbook.chat_app.tinker_chat_cli import ChatSession
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.weights import __main__ as weights_command
from tinker_cookbook.weights.proof import read_proof

# Recipes are tried with qwen3_vl.
RENDERERS = {
    "qwen3_vl_moe": "qwen3_vl_instruct",
    "qwen2_5_vl": "qwen2_5_vl",
    "smolvlm": "smolvlm",
    "idefics3": "idefics3",
    "gemma3": "gemma3",
    "qwen3_5": "qwen3_5",
    "mistral3": None,  # the model's own chat template
}


def images(*numbers):
    return [{"type": "image", "image": f"{number}.png"} for number in numbers]


@pytest.mark.parametrize("kind", RENDERERS)
def test_train_resume_chat_and_merge(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate([(48, 32), (64, 40), (90, 24), (33, 64)]):
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    what, answer = {"type": "text", "text": "What?"}, {"role": "assistant", "content": "Red."}
    rows = [
        {"messages": [{"role": "user", "content": [*shown, what]}, answer]}
        for shown in ([], images(0), images(1, 2, 3))
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows * 3)))
    log = tmp_path / "log"
    for steps in (2, 3):
        settings = sl_basic.CLIConfig(
            model_name=str(tiny_vlm(tmp_path / "model", kind)),
            renderer_name=RENDERERS[kind],
            dataset_path=str(tmp_path / "train.jsonl"),
            batch_size=3,
            learning_rate=0.01,
            lora_rank=4,
            log_path=str(log),
            save_every=1,
            eval_every=0,
            show_samples=0,
            max_steps=steps,
            behavior_if_log_dir_exists="resume",
            device="cpu",
            dtype="float32",
        )
        asyncio.run(sl_basic.main(settings))
    lines = (log / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["train_mean_nll"] for line in lines]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    connection = connect("local", device="cpu", dtype="float32")

    async def talk():
        model = await open_sampling_model(connection, SamplingModelSettings(model_path=str(log)))
        chat = ChatSession(model.client, model.renderer, 4)
        picture = {"type": "image", "image": str(tmp_path / "2.png")}
        chat.messages.append({"role": "user", "content": [picture, what]})
        await chat.generate_response()
        chat.add_user_message("Sure?")
        await chat.generate_response()
        return [message["role"] for message in chat.messages]

    try:
        assert asyncio.run(talk()) == ["user", "assistant"] * 2
    finally:
        connection.close()
    weights_command.main(["merge", str(log), f"out={tmp_path / 'out'}", "dtype=float32"])
    proof = read_proof(tmp_path / "out")
    assert proof is not None
    assert proof.facts["image"] == "compared on a prompt with an image too"
