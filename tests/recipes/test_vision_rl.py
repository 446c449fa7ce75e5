"""Generated pictures, their answers, and reinforcement learning on them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from recipes.tiny_models.llama import make_model_once, new_folder
from recipes.tiny_models.vlm import RENDERER, make_tiny_vlm
from recipes.vision_rl import train
from recipes.vision_rl.env import PictureEnv
from recipes.vision_rl.pictures import KINDS, Picture, make_pictures, texts
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts.conversation import conversation_of
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("vision") / "model"
    make_tiny_vlm(str(folder), texts())
    return str(folder)


def pixels(seed: int, kind: str) -> tuple[np.ndarray, str, str]:
    image, question, answer = Picture(kind, seed).draw()
    return np.asarray(image).astype(int), question, answer


def pieces(mask: np.ndarray) -> int:
    """The number of connected pieces of a mask, by filling one after another."""
    left, count = {tuple(at) for at in np.argwhere(mask)}, 0
    while left:
        count += 1
        edge = [left.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
    return count


def test_answers_are_what_the_pixels_show():
    for seed in range(60):
        shown, _, answer = pixels(seed, "count")
        assert pieces(shown.max(2) > 100) == int(answer)
        shown, question, answer = pixels(seed, "chart")
        channel = ["red", "green", "blue"].index(question.split()[4])
        others = np.delete(shown, channel, axis=2).max(2)
        bar = ((shown[..., channel] > 150) & (others < 100)).any(1)
        assert bar.sum() == 4 * int(answer) + 1  # a unit has 4 pixels
    images = {Picture("number", seed).draw()[0].tobytes() for seed in range(60)}
    assert len(images) == 60


def test_rewards_are_exact(model):
    renderer = get_renderer(RENDERER, get_tokenizer(model), get_image_processor(model))
    for picture in make_pictures(3, 0):
        env = PictureEnv(renderer, picture)
        answer = env.get_reference_answer()
        graded = {text: env.check_answer(text) for text in (answer, f"It is {answer}.", "7x", "")}
        assert graded == {answer: True, f"It is {answer}.": True, "7x": False, "": False}
        prompt, _ = asyncio.run(env.initial_observation())
        assert [chunk.type for chunk in prompt.chunks] == ["encoded_text", "image", "encoded_text"]
        assert prompt.chunks[1].expected_tokens == 9
        assert conversation_of(env) == ("", "")  # a prompt is no conversation
        tokens = renderer.tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        asyncio.run(env.step(tokens))
        question, said = json.loads(conversation_of(env)[0])
        assert [part["type"] for part in question["content"]] == ["image", "text"]
        assert (said["role"], said["content"]) == ("assistant", answer)


def settings(model: str, tmp_path, **more) -> train.CLIConfig:
    return train.CLIConfig(
        model_name=model,
        renderer_name=RENDERER,
        log_path=str(tmp_path / "run"),
        groups_per_batch=3,
        group_size=4,
        num_test=6,
        max_steps=2,
        eval_every=2,
        learning_rate=1e-3,
        lora_rank=8,
        train_vision=True,
        device="cpu",
        dtype="float32",
        **more,
    )


def test_a_run_samples_grades_and_trains(model, tmp_path, monkeypatch):
    # The model has learned nothing, so no answer of it would be right.
    monkeypatch.setattr(PictureEnv, "check_answer", lambda _, answer: len(answer) % 2)
    asyncio.run(train.main(settings(model, tmp_path)))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {f"test/env/{kind}/reward/total" for kind in KINDS} <= rows[2].keys()
    # The sampler and the trainer see the same images.
    assert abs(rows[1]["optim/kl_sample_train_v1"]) < 1e-5


def test_a_model_is_made_once(tmp_path):
    """Two runs at once, after a run that was killed while it made the model."""
    output, made = str(tmp_path / "models" / "m"), []
    (tmp_path / f"models/.m.{os.getpid()}").mkdir(parents=True)

    def make() -> None:
        with new_folder(output) as folder:
            time.sleep(0.2)
            (folder / "config.json").write_text("{}")
            made.append(folder)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(make_model_once, output, make) for _ in range(2)]:
            done.result()
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == ["m"]
