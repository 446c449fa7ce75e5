"""The process of TRL's side: GRPOTrainer on the problems of our recipe, with its rewards.

A prompt is the text of our environment's first observation, and the reward what our environment
gives for the tokens that TRL sampled. Advantages are centred and not scaled, there is no KL
penalty, no clipping of gradients, and Adam's settings are ours.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import run_worker
from benchmarks.rl.config import recipe_settings
from benchmarks.trl_comparison import lora_config, make_clock, training_arguments
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, InitialObservationOverflow
from tinker_cookbook.utils.imports import lazy_module

transformers = lazy_module("transformers")


class Problems:
    """All problems of the run, in order: their prompts, and rewards of answers."""

    def __init__(self, builders: Sequence[EnvGroupBuilder]) -> None:
        self._builders = builders
        self.prompts: list[list[int]] = asyncio.run(self._prompts())
        """Token ids."""

    def rewards(self, problems: Sequence[int], answers: Sequence[list[int]]) -> list[float]:
        """Returns the rewards of new environments for the sampled tokens."""

        async def run_all() -> list[float]:
            together = zip(problems, answers, strict=True)
            return list(await asyncio.gather(*(self._reward(*pair) for pair in together)))

        return asyncio.run(run_all())

    async def _prompts(self) -> list[list[int]]:
        return [(await self._open(index))[1] for index in range(len(self._builders))]

    async def _reward(self, problem: int, answer: list[int]) -> float:
        env, _ = await self._open(problem)
        return (await env.step(answer)).reward

    async def _open(self, problem: int) -> tuple[Env, list[int]]:
        """Returns a new environment and its prompt."""
        env = (await self._builders[problem].make_envs())[0]
        opening = await env.initial_observation()
        if isinstance(opening, InitialObservationOverflow):
            raise DataValidationError(f"problem {problem}: the prompt is too long for the model")
        return env, opening[0].to_ints()


def read_problems(job: dict[str, Any]) -> tuple[Problems, Any]:
    """The recipe's problems, and its config with everything derived filled in."""
    config = recipe_settings(job, Path("unused")).resolved()
    dataset, _ = asyncio.run(config.dataset_builder())
    batches = [dataset.get_batch(index) for index in range(job["steps"])]
    return Problems([builder for batch in batches for builder in batch]), config


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds and mean reward of every step."""
    import torch
    from datasets import Dataset
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from tinker_cookbook.engine.devices import choose_device, cpu_threads
    from tinker_cookbook.engine.model.resolve import resolve_model

    choice = choose_device(job["device"], job["dtype"])
    if choice.device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    folder = resolve_model(job["model_name"]).folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=choice.dtype)
    problems, config = read_problems(job)
    texts = [prompt_text(tokenizer, prompt) for prompt in problems.prompts]
    clock = make_clock()

    def reward(completion_ids: list[list[int]], problem: list[int], **_: Any) -> list[float]:
        return problems.rewards(problem, completion_ids)

    with tempfile.TemporaryDirectory() as folder_out:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=grpo_config(job, config, folder_out, choice),
            train_dataset=Dataset.from_dict({"prompt": texts, "problem": list(range(len(texts)))}),
            processing_class=tokenizer,
            callbacks=[clock],
            peft_config=lora_config(model, job["lora_rank"]),
        )
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    return {
        "seconds": clock.seconds,
        "rewards": rewards,
        "parts": {},
        "notes": _notes(tokenizer, texts, problems, trainer),
        "trl": version("trl"),
    }


def prompt_text(tokenizer: Any, prompt: list[int]) -> str:
    """Returns the text whose tokens, with those that the tokenizer adds, are ``prompt``."""
    added = tokenizer("")["input_ids"]
    own = prompt[len(added) :] if prompt[: len(added)] == added else prompt
    return tokenizer.decode(own)


def grpo_config(job: dict[str, Any], config: Any, folder: str, choice: Any) -> Any:
    """``GRPOConfig`` for the same step as ours."""
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    samples = job["groups_per_batch"] * job["group_size"]
    at_once = job["trl_batch_size"] or samples
    return GRPOConfig(
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=samples // at_once,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        shuffle_dataset=False,
        temperature=config.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        scale_rewards="none",
        **training_arguments(job, config, folder, choice),
    )


def _notes(tokenizer: Any, texts: Sequence[str], problems: Problems, trainer: Any) -> list[str]:
    """Returns what differs between the sides."""
    notes = []
    if tokenizer(list(texts))["input_ids"] != problems.prompts:
        notes.append("TRL's tokenizer reads the prompts as other tokens than ours")
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return [*notes, f"{trained:,} trained parameters"]


if __name__ == "__main__":
    sys.exit(run_worker(run, *sys.argv[1:]))
