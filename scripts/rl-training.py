"""Reinforcement learning in one loop: groups of samples, rewards, advantages, PPO steps.

    python scripts/rl-training.py
    python scripts/rl-training.py model_name=Qwen/Qwen3-8B backend=tinker num_steps=20

The model adds two digits; the reward of an answer is 1 if its last number is the sum.
``recipes/rl_loop.py`` does it with problems from a file, evaluates, and resumes.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import chz
import numpy as np
import tinker

from tinker_cookbook import model_info
from tinker_cookbook.backends import SamplingClient, connect
from tinker_cookbook.renderers import Renderer, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

Sampled = tuple[list[tinker.Datum], list[float]]


@chz.chz
class Config:
    """Settings of the loop."""

    model_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    num_steps: int = chz.field(default=5, doc="Optimizer steps")
    num_questions: int = chz.field(default=8, doc="Questions of a step")
    group_size: int = chz.field(default=8, doc="Answers to a question")
    max_tokens: int = 12
    learning_rate: float = 3e-4
    lora_rank: int = 16


def reward_of(answer: str, expected: int) -> float:
    """Returns 1 if the last number of the answer is the expected one, else 0."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == expected)


def sample_datum(
    prompt: tinker.ModelInput, tokens: list[int], logprobs: list[float], advantage: float
) -> tinker.Datum:
    """Returns a sample as training data; the prompt has advantage 0, so it is not trained."""
    before = prompt.length - 1  # position i predicts token i + 1
    fields: dict[str, Any] = {
        "target_tokens": [*prompt.to_ints()[1:], *tokens],
        "logprobs": [0.0] * before + logprobs,
        "advantages": [0.0] * before + [advantage] * len(tokens),
    }
    whole = tinker.ModelInput.from_ints([*prompt.to_ints(), *tokens[:-1]])
    return tinker.Datum(model_input=whole, loss_fn_inputs=fields)


async def sample_group(
    client: SamplingClient, renderer: Renderer, config: Config, terms: tuple[int, int]
) -> Sampled:
    """Returns the answers to a question as training data, and their rewards."""
    question = f"What is {terms[0]} + {terms[1]}? Answer with a number."
    prompt = renderer.build_generation_prompt([{"role": "user", "content": question}])
    params = tinker.SamplingParams(
        max_tokens=config.max_tokens, temperature=1.0, stop=renderer.get_stop_sequences()
    )
    sequences = (await client.sample(prompt, config.group_size, params)).sequences
    answers = [get_text_content(renderer.parse_response(s.tokens)[0]) for s in sequences]
    rewards_G = np.array([reward_of(answer, sum(terms)) for answer in answers])
    # An answer is as good as it is better than the others of its group.
    advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-8)
    data = [
        sample_datum(prompt, s.tokens, s.logprobs or [], float(advantage))
        for s, advantage in zip(sequences, advantages_G, strict=True)
        if s.tokens and rewards_G.std() > 0  # equal rewards teach nothing
    ]
    return data, rewards_G.tolist()


async def main(config: Config) -> None:
    """Trains, and prints the mean reward of each step."""
    renderer_name = model_info.get_recommended_renderer_name(config.model_name)
    renderer = get_renderer(renderer_name, get_tokenizer(config.model_name))
    rng = random.Random(0)
    with connect(config.backend) as connection:
        training = await connection.service.create_lora_training_client(
            base_model=config.model_name, rank=config.lora_rank
        )
        for step in range(config.num_steps):
            client = await training.save_weights_and_get_sampling_client()
            terms = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(config.num_questions)]
            groups = await asyncio.gather(
                *(sample_group(client, renderer, config, pair) for pair in terms)
            )
            data = [datum for group, _ in groups for datum in group]
            reward = np.mean([rewards for _, rewards in groups])
            print(f"step {step}: mean reward {reward:.3f}, {len(data)} samples trained")
            if not data:
                continue
            clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
            forward_backward = training.forward_backward(data, "ppo", clip)
            optim_step = training.optim_step(tinker.AdamParams(learning_rate=config.learning_rate))
            await forward_backward
            await optim_step


if __name__ == "__main__":
    run_entrypoint(main)
