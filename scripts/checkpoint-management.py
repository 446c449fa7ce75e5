"""Checkpoints: save for sampling and for training, load, continue, list, and set a lifetime.

python scripts/checkpoint-management.py
python scripts/checkpoint-management.py model_name=Qwen/Qwen3-8B backend=tinker
"""

from __future__ import annotations

from typing import Any

import chz
import tinker

from tinker_cookbook.backends import connect
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class Config:
    """The model, and where it is trained."""

    model_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    lora_rank: int = 8


def train_step(training: Any, tokens: list[int]) -> float:
    """Trains on a text once; returns the summed loss before the step."""
    fields: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    model_input = tinker.ModelInput.from_ints(tokens[:-1])
    datum = tinker.Datum(model_input=model_input, loss_fn_inputs=fields)
    forward_backward = training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    return forward_backward.result().metrics["loss:sum"]


def main(config: Config) -> None:
    """Goes through the life of a checkpoint."""
    with connect(config.backend) as connection:
        service: Any = connection.service
        training = service.create_lora_training_client(config.model_name, config.lora_rank).result()
        tokens = training.get_tokenizer().encode("Once upon a time there was a checkpoint.")
        print(f"loss at first: {train_step(training, tokens):.4f}")

        # The adapter alone is smaller, and enough for sampling.
        sampler_path = training.save_weights_for_sampler(name="demo-sampler").result().path
        state_path = training.save_state(name="demo-state").result().path
        print(f"for sampling: {sampler_path}\nfor training: {state_path}")

        after = train_step(training, tokens)
        training.load_state_with_optimizer(state_path).result()
        again = train_step(training, tokens)
        print(f"loss after the checkpoint: {after:.4f}; loaded: {again:.4f}")
        resumed = service.create_training_client_from_state_with_optimizer(state_path).result()
        print(f"loss in a new run from it: {train_step(resumed, tokens):.4f}")

        client = service.create_sampling_client(model_path=sampler_path).result()
        params = tinker.SamplingParams(max_tokens=8, temperature=0.0)
        prompt = tinker.ModelInput.from_ints(tokens[:4])
        sampled = client.sample(prompt, 1, params).result().sequences[0].tokens
        print(f"sampled: {client.get_tokenizer().decode([*tokens[:4], *sampled])!r}")

        rest = service.create_rest_client()
        rest.set_checkpoint_ttl_from_tinker_path(sampler_path, 24 * 3600).result()
        for checkpoint in rest.list_checkpoints(training.get_info().model_id).result().checkpoints:
            print(f"  {checkpoint.checkpoint_type}: {checkpoint.checkpoint_id}")
        rest.delete_checkpoint_from_tinker_path(state_path).result()
        print("deleted the one for training; the other one ends in a day")


if __name__ == "__main__":
    run_entrypoint(main)
