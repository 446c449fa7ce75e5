"""Fine-tuning of a vision-language model in one loop: images to tokens, steps, a sample.

    python scripts/vision-training.py
    python scripts/vision-training.py model_name=Qwen/Qwen3-VL-30B-A3B-Instruct backend=tinker

Without ``model_name`` it makes a tiny model of random weights, which learns to name colours.
``recipes/vlm_classifier`` trains on folders and datasets of images.
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

import chz
import numpy as np
import tinker
from PIL import Image

from tinker_cookbook import model_info
from tinker_cookbook.backends import connect
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.recipes.tiny_models.vlm import RENDERER, make_tiny_vlm
from tinker_cookbook.renderers import (
    ImagePart,
    Message,
    Renderer,
    TextPart,
    get_renderer,
    get_text_content,
)
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

QUESTION = "What is in this image?"
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


@chz.chz
class Config:
    """Settings of the loop."""

    model_name: str | None = chz.field(default=None, doc="Default: a tiny model made by the script")
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    num_steps: int = chz.field(default=30, doc="Optimizer steps")
    batch_size: int = chz.field(default=12, doc="Images per step")
    learning_rate: float | None = chz.field(default=None, doc="Default: 5e-3 for the tiny model")
    lora_rank: int = 16


def painted(name: str, rng: random.Random) -> Message:
    """Returns the user's message: an image of a colour, and the question."""
    # Pillow images, files and data URIs are sent as PNG or JPEG, with the format beside the bytes.
    colour = tuple(level + rng.randint(-40, 40) for level in COLOURS[name])
    return Message(
        role="user",
        content=[
            ImagePart(type="image", image=Image.new("RGB", (16, 16), colour)),
            TextPart(type="text", text=QUESTION),
        ],
    )


def image_datum(renderer: Renderer, name: str, rng: random.Random) -> tinker.Datum:
    """Returns an image with its answer as training data; the image itself has weight 0."""
    answer = Message(role="assistant", content=f"This is {name}.")
    model_input, weights = renderer.build_supervised_example([painted(name, rng), answer])
    return datum_from_model_input_weights(model_input, weights)


async def main(config: Config) -> None:
    """Trains, and asks about a new image."""
    with tempfile.TemporaryDirectory() as folder, connect(config.backend) as connection:
        # The image processor counts an image's tokens, and the renderer writes the tokens before
        # and after it (<|vision_start|> and <|vision_end|>).
        if config.model_name is None:
            model_name, renderer_name, rate = f"{folder}/model", RENDERER, 5e-3
            make_tiny_vlm(model_name, [QUESTION, *(f"This is {name}." for name in COLOURS)])
        else:
            model_name, rate = config.model_name, 1e-4
            renderer_name = model_info.get_recommended_renderer_name(model_name)
        processor = get_image_processor(model_name)
        renderer = get_renderer(renderer_name, get_tokenizer(model_name), image_processor=processor)
        options: dict[str, Any] = {"rank": config.lora_rank, "seed": 0}
        if config.model_name is None:
            # Its vision tower has learned nothing yet. Not an option of the hosted service.
            options["train_vision"] = True
        training = await connection.service.create_lora_training_client(model_name, **options)
        rng = random.Random(0)
        params = tinker.AdamParams(learning_rate=config.learning_rate or rate)
        for step in range(config.num_steps):
            names = rng.choices(list(COLOURS), k=config.batch_size)
            data = [image_datum(renderer, name, rng) for name in names]
            forward_backward = training.forward_backward(data, "cross_entropy")
            optim_step = training.optim_step(params)
            result = await forward_backward
            await optim_step
            logprobs = np.concatenate([o["logprobs"].to_numpy() for o in result.loss_fn_outputs])
            weights = np.concatenate([d.loss_fn_inputs["weights"].to_numpy() for d in data])
            print(f"step {step}: loss per token {-np.dot(logprobs, weights) / weights.sum():.4f}")

        client = await training.save_weights_and_get_sampling_client()
        sampling = tinker.SamplingParams(
            max_tokens=16, temperature=0.0, stop=renderer.get_stop_sequences()
        )
        for name in COLOURS:
            prompt = renderer.build_generation_prompt([painted(name, rng)])
            response = await client.sample(prompt, 1, sampling)
            message, _ = renderer.parse_response(response.sequences[0].tokens)
            print(f"{name}: {get_text_content(message)}")


if __name__ == "__main__":
    run_entrypoint(main)
