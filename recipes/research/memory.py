"""How fast does a model memorise a random sequence of digits, by RL and by supervised learning?

    python -m recipes.research.memory
    python -m recipes.research.memory ranks=1,32 seeds=0 log_path=…

An episode is one answer of N digits, with a reward for each right digit. The bits that the model
knows are ``N log2(10) + log2 p(sequence)``. A supervised example shows all of its ``N log2(10)``
bits. RL is told N times whether a guess of one in ten is right: at most ``0.469 N`` bits. Other
rewards show less: the number of right digits as one reward of the episode, or whether the whole
sequence is right. The control has random rewards.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any, Literal

import chz
import numpy as np
import tinker

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import ServiceClient, TrainingClient
from tinker_cookbook.backends.connect import connect
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.digits_model import START, digits_model
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

Reward = Literal["sum", "each", "whole", "random"]
"""``sum``: the number of right digits for the episode; ``each``: every digit has its own reward;
``whole``: 1 if all are right; ``random``: a random number for the episode."""
GUESS_BITS = -0.1 * math.log2(0.1) - 0.9 * math.log2(0.9)
"""Bits that a random guess of a digit shows, if one is told whether it is right: 0.469."""
OTHER_REWARDS: dict[str, Reward] = {
    "RL, sum of digits": "sum",
    "RL, whole sequence": "whole",
    "RL, random reward": "random",
}


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/memory")
    num_digits: int = number(8, "Length of the sequence", low=1)
    ranks: list[int] = study.several([1, 2, 4, 8, 16, 32], "LoRA ranks")
    rl_steps: int = number(60, "RL steps", low=1)
    episodes_per_step: int = number(32, "Episodes of an RL step", low=2)
    sl_steps: int = number(30, "Supervised steps of one example each", low=1)
    rl_learning_rate: float = peak_rate(3e-3, "Learning rate of RL")
    entropy_bonus: float = number(0.3, "Reward of a nat of entropy of a digit")
    sl_learning_rate: float = peak_rate(1e-2, "Learning rate of supervised learning")


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(ranks=[8], rl_steps=2)
    model = digits_model(quick=config.quick)
    with connect("local", dtype="float32") as connection:
        run = partial(_reinforce, config, connection.service, model)
        arms = {}
        for rank in config.ranks:
            arms[f"RL, rank {rank}"] = partial(run, rank, "each")
            arms[f"SL, rank {rank}"] = partial(_imitate, config, connection.service, model, rank)
        for name, reward in OTHER_REWARDS.items():
            arms[name] = partial(run, max(config.ranks), reward)
        columns = {"known": "bits known", "rate": "bits an episode", "right": "digits right"}
        study.run_study(config, arms, columns, partial(draw, config))


def start(
    config: Config, service: ServiceClient, model: str, rank: int, seed: int
) -> tuple[TrainingClient, list[int], tinker.Datum]:
    """Returns a new adapter, the secret digits of the seed as tokens, and them as an example."""
    digits = "".join(random.Random(seed).choices("0123456789", k=config.num_digits))
    tokens = get_tokenizer(model).encode(START + digits, add_special_tokens=False)
    client = service.create_lora_training_client(model, rank=rank, seed=seed).result()
    return client, tokens[1:], datum_from_tokens_weights(tokens, [1.0] * len(tokens))


def _imitate(config: Config, service: ServiceClient, model: str, rank: int, seed: int) -> study.Row:
    """Trains on the sequence itself, once a step."""
    client, _, example = start(config, service, model, rank, seed)
    adam, bits = tinker.AdamParams(learning_rate=config.sl_learning_rate), list[float]()
    for _ in range(config.sl_steps):
        output = client.forward_backward([example], "cross_entropy")
        client.optim_step(adam).result()
        # The loss of a step is that of the weights before it.
        bits.append(_bits(config, output.result()))
    bits.append(_bits(config, client.forward([example], "cross_entropy").result()))
    return _result(config, client, example, list(range(config.sl_steps + 1)), bits)


def _reinforce(
    config: Config, service: ServiceClient, model: str, rank: int, reward: Reward, seed: int
) -> study.Row:
    """Trains on sampled answers."""
    client, secret, example = start(config, service, model, rank, seed)
    adam, bits = tinker.AdamParams(learning_rate=config.rl_learning_rate), list[float]()
    prompt = tinker.ModelInput.from_ints(example.model_input.to_ints()[:1])
    rng, count = random.Random(seed), config.episodes_per_step
    for step in range(config.rl_steps):
        bits.append(_bits(config, client.forward([example], "cross_entropy").result()))
        params = tinker.SamplingParams(max_tokens=config.num_digits, seed=1000 * seed + step)
        sampler = client.save_weights_and_get_sampling_client().result()
        answers = sampler.sample(prompt, count, params).result().sequences
        rewards_EN = np.array([_rewards(list(one.tokens), secret, reward, rng) for one in answers])
        # The baseline is the mean of the step's episodes, as in a group of RL.
        advantages_EN = rewards_EN - rewards_EN.mean(0)
        # A bonus for the entropy of each digit. Without it the model soon writes one digit only.
        surprise_EN = -np.array([one.logprobs for one in answers])
        advantages_EN += config.entropy_bonus * (surprise_EN - surprise_EN.mean(0))
        data = [
            _datum(prompt, list(one.tokens), list(one.logprobs or ()), advantages.tolist())
            for one, advantages in zip(answers, advantages_EN, strict=True)
            if advantages.any()
        ]
        if data:
            client.forward_backward(data, "importance_sampling").result()
            client.optim_step(adam).result()
    bits.append(_bits(config, client.forward([example], "cross_entropy").result()))
    return _result(config, client, example, [count * i for i in range(len(bits))], bits)


def _rewards(answer: list[int], secret: list[int], kind: Reward, rng: random.Random) -> list[float]:
    """Returns the reward of each digit of an episode."""
    # An answer may end early.
    right = [float(answer[i : i + 1] == [digit]) for i, digit in enumerate(secret)]
    if kind == "each":
        return right
    whole = {"sum": sum(right), "whole": float(all(right)), "random": rng.randint(0, len(right))}
    return [float(whole[kind])] * len(right)


def _datum(
    prompt: tinker.ModelInput, tokens: list[int], logprobs: list[float], advantages: list[float]
) -> tinker.Datum:
    fields: dict[str, Any] = {
        "target_tokens": tokens,
        "logprobs": logprobs,
        "advantages": advantages[: len(tokens)],
    }
    whole = tinker.ModelInput.from_ints([*prompt.to_ints(), *tokens[:-1]])
    return tinker.Datum(model_input=whole, loss_fn_inputs=fields)


def _bits(config: Config, output: Any) -> float:
    """Returns the bits that the model knows of the sequence, from the loss in nats."""
    return config.num_digits * math.log2(10) - output.metrics["loss:sum"] / math.log(2)


def _result(
    config: Config, client: TrainingClient, example: tinker.Datum, episodes: list[int], bits: Any
) -> study.Row:
    # Until half of the bits are known: later the curve flattens, because there is less to learn.
    half = config.num_digits * math.log2(10) / 2
    at = next((i for i, known in enumerate(bits) if known >= half), len(bits) - 1)
    prompt = tinker.ModelInput.from_ints(example.model_input.to_ints()[:1])
    sampler = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=config.num_digits, temperature=0.0)
    answer = list(sampler.sample(prompt, 1, params).result().sequences[0].tokens)
    secret = example.loss_fn_inputs["target_tokens"].tolist()
    return {
        "known": bits[-1],
        "rate": (bits[at] - bits[0]) / episodes[at],
        "right": sum(a == b for a, b in zip(answer, secret, strict=False)),
        "episodes": episodes,
        "bits": bits,
    }


def draw(config: Config, figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws the bits known over the episodes, and the bits of an episode over the rank."""
    left, right = figure.subplots(1, 2)
    # The curves of other ranks lie between these.
    shown = dict.fromkeys((min(config.ranks), max(config.ranks)))
    names = [f"{kind}, rank {rank}" for kind in ("SL", "RL") for rank in shown]
    for name, colour in zip([*names, *OTHER_REWARDS], study.COLOURS, strict=False):
        if name in of_arm:
            style = "--" if name.startswith("SL") else ":" if name in OTHER_REWARDS else "-"
            study.draw_curve(left, of_arm[name], "episodes", "bits", name, colour, style)
    total = config.num_digits * math.log2(10)
    left.axhline(total, color="black", linewidth=0.8)
    left.set_xscale("symlog", linthresh=1)
    left.set_xlim(0)
    title = f"{config.num_digits} digits = {total:.1f} bits"
    study.finish_axes(left, title, "episodes", "bits known", legend=False)
    # Inside, it would hide the start of the curves.
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    for kind, colour in (("RL", study.COLOURS[0]), ("SL", study.COLOURS[1])):
        rates = [[row["rate"] for row in of_arm.get(f"{kind}, rank {r}", [])] for r in config.ranks]
        points = [(r, sum(v) / len(v)) for r, v in zip(config.ranks, rates, strict=True) if v]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", color=colour, label=kind)
    right.axhline(total, color=study.COLOURS[1], linestyle=":", label="bound of SL")
    bound = config.num_digits * GUESS_BITS
    right.axhline(bound, color=study.COLOURS[0], linestyle=":", label="bound of RL")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    study.finish_axes(right, "Until half is known", "LoRA rank", "bits an episode")


if __name__ == "__main__":
    run_entrypoint(main)
