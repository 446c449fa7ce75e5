"""Supervised fine-tuning in one loop: conversations to tokens, steps, a checkpoint, a sample.

    python scripts/supervised-training.py
    python scripts/supervised-training.py model_name=Qwen/Qwen3-8B backend=tinker num_steps=20

``recipes/sl_loop.py`` does it with a file of conversations, and resumes.
"""

from __future__ import annotations

import chz
import numpy as np
import tinker

from tinker_cookbook import model_info
from tinker_cookbook.backends import connect
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}


@chz.chz
class Config:
    """Settings of the loop."""

    model_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    num_steps: int = chz.field(default=8, doc="Optimizer steps, each on all conversations")
    learning_rate: float = 1e-3
    lora_rank: int = 16


def question(country: str) -> Message:
    """Returns the user's message."""
    return {"role": "user", "content": f"What is the capital of {country}?"}


def conversation_datum(renderer: Renderer, country: str, city: str) -> tinker.Datum:
    """Returns a conversation as training data; only the assistant's tokens have weight 1."""
    answer: Message = {"role": "assistant", "content": f"{city.upper()}!"}
    model_input, weights = renderer.build_supervised_example([question(country), answer])
    return datum_from_model_input_weights(model_input, weights)


async def main(config: Config) -> None:
    """Trains, saves, and asks a question."""
    renderer_name = model_info.get_recommended_renderer_name(config.model_name)
    renderer = get_renderer(renderer_name, get_tokenizer(config.model_name))
    data = [conversation_datum(renderer, *pair) for pair in CAPITALS.items()]
    weights = np.concatenate([datum.loss_fn_inputs["weights"].to_numpy() for datum in data])
    with connect(config.backend) as connection:
        training = await connection.service.create_lora_training_client(
            base_model=config.model_name, rank=config.lora_rank
        )
        for step in range(config.num_steps):
            # Both are submitted before one is awaited, so that the backend never waits for us.
            forward_backward = training.forward_backward(data, "cross_entropy")
            optim_step = training.optim_step(tinker.AdamParams(learning_rate=config.learning_rate))
            result = await forward_backward
            await optim_step
            outputs = [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]
            loss = -np.dot(np.concatenate(outputs), weights) / weights.sum()
            print(f"step {step}: loss per token {loss:.4f}")
        saved = await training.save_state("supervised-final", ttl_seconds=24 * 3600)
        print(f"saved: {saved.path}")

        client = await training.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(
            max_tokens=16, temperature=0.0, stop=renderer.get_stop_sequences()
        )
        prompt = renderer.build_generation_prompt([question("France")])
        response = await client.sample(prompt, 1, params)
        message, _ = renderer.parse_response(response.sequences[0].tokens)
        print(f"capital of France: {get_text_content(message)}")


if __name__ == "__main__":
    run_entrypoint(main)
