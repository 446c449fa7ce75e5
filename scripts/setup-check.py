"""Checks that a backend can be reached: its models, and one short response.

    python scripts/setup-check.py
    python scripts/setup-check.py model_name=Qwen/Qwen3-8B backend=tinker

``backend=auto`` is the hosted Tinker API if a key is set, else the bundled engine on this machine.
"""

from __future__ import annotations

from typing import Any

import chz
import tinker

from tinker_cookbook.backends import connect
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class Config:
    """What to check."""

    model_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")


def main(config: Config) -> None:
    """Prints the models of the backend and a response of one."""
    with connect(config.backend) as connection:
        print(connection.describe())
        service: Any = connection.service
        capabilities = service.get_server_capabilities()
        for model in capabilities.supported_models:
            print(f"  model: {model.model_name}, context {model.max_context_length}")
        client = service.create_sampling_client(base_model=config.model_name).result()
        tokenizer = client.get_tokenizer()
        prompt = tinker.ModelInput.from_ints(tokenizer.encode("The capital of France"))
        params = tinker.SamplingParams(max_tokens=8, temperature=0.0)
        tokens = client.sample(prompt, 1, params).result().sequences[0].tokens
        print(tokenizer.decode([*prompt.to_ints(), *tokens]))


if __name__ == "__main__":
    run_entrypoint(main)
