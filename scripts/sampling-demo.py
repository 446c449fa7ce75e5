"""Sampling: several responses to several questions at once, and log-probabilities of a text.

python scripts/sampling-demo.py
python scripts/sampling-demo.py model_path=tinker://RUN/sampler_weights/NAME
"""

from __future__ import annotations

import asyncio

import chz
import tinker

from tinker_cookbook import model_info
from tinker_cookbook.backends import SamplingClient, connect
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

QUESTIONS = ("Name a colour.", "What is the capital of Italy?")


@chz.chz
class Config:
    """What to sample."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", doc="Base model, also of model_path"
    )
    model_path: str | None = chz.field(default=None, doc="Checkpoint; default: the base model")
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    num_samples: int = chz.field(default=2, doc="Responses to a question")
    max_tokens: int = 32
    temperature: float = 0.8


async def print_logprobs(client: SamplingClient, text: str) -> None:
    """Prints each token of a text with its log-probability; the first token has none."""
    tokenizer = client.get_tokenizer()
    tokens = tokenizer.encode(text)
    logprobs = await client.compute_logprobs(tinker.ModelInput.from_ints(tokens))
    for token, logprob in zip(tokens, logprobs, strict=True):
        shown = "" if logprob is None else f"{logprob:8.3f}"
        print(f"  {shown:>8} {tokenizer.decode([token])!r}")


async def main(config: Config) -> None:
    """Prints the responses and the log-probabilities."""
    renderer_name = model_info.get_recommended_renderer_name(config.model_name)
    renderer = get_renderer(renderer_name, get_tokenizer(config.model_name))
    params = tinker.SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        stop=renderer.get_stop_sequences(),
    )
    conversations = [[Message(role="user", content=question)] for question in QUESTIONS]
    with connect(config.backend) as connection:
        client = await connection.service.create_sampling_client(
            **(
                {"model_path": config.model_path}
                if config.model_path
                else {"base_model": config.model_name}
            )
        )
        # Requests that wait together are sampled together.
        responses = await asyncio.gather(
            *(
                client.sample(
                    renderer.build_generation_prompt(messages), config.num_samples, params
                )
                for messages in conversations
            )
        )
        for question, response in zip(QUESTIONS, responses, strict=True):
            print(question)
            for sequence in response.sequences:
                message, _ = renderer.parse_response(sequence.tokens)
                print(f"  {get_text_content(message)!r} ({sequence.stop_reason})")
        await print_logprobs(client, "The capital of Italy is Rome.")


if __name__ == "__main__":
    run_entrypoint(main)
