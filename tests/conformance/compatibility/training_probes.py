"""Probes of the training client: its methods, and the losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tinker import types

from tests.conformance.compatibility.probing import Call, Probes, expect
from tests.conformance.compatibility.world import (
    TOKENS,
    World,
    datum,
    loss_of,
    prompt,
    run_of,
)

TRAINING = Probes()

ADAM = types.AdamParams(learning_rate=1e-2)


@TRAINING("forward", "the loss is the sum of the log-probabilities, and nothing changes")
def forward(world: World, call: Call) -> None:
    one, two = (call(world.training, [datum()], "cross_entropy") for _ in range(2))
    total = float(one.loss_fn_outputs[0]["logprobs"].to_numpy().sum())
    expect(abs(one.metrics["loss:sum"] + total) < 1e-3, "the sum")
    expect(one.metrics == two.metrics, "nothing changed")


@TRAINING("forward_backward", "the step after it lowers the loss")
def forward_backward(world: World, call: Call) -> None:
    client = world.new_training()
    before = call(client, [datum()], "cross_entropy").metrics["loss:sum"]
    client.optim_step(ADAM).result()
    expect(loss_of(client) < before, "a lower loss")


@TRAINING("forward_backward_custom", "the client's loss and metric; the step lowers it")
def forward_backward_custom(world: World, call: Call) -> None:

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple:
        total = -torch.stack([one.sum() for one in logprobs]).sum()
        return total, {"half": float(total) / 2}

    client = world.new_training()
    metrics = call(client, [datum()], loss).metrics
    expect(abs(metrics["half"] - metrics["loss:sum"] / 2) < 1e-3, "the client's metric")
    client.optim_step(ADAM).result()
    expect(loss_of(client) < metrics["loss:sum"], "a lower loss")


@TRAINING("optim_step", "the norm of the gradient, and a lower loss")
def optim_step(world: World, call: Call) -> None:
    client = world.new_training()
    before = client.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"]
    metrics = call(client, ADAM).metrics
    expect(metrics["grad_norm"] > 0 and loss_of(client) < before, "a step")


@TRAINING("save_state", "the checkpoint is listed")
def save_state(world: World, call: Call) -> None:
    path = call(world.training, world.name()).path
    found = world.listed(path)
    expect(found is not None and found.checkpoint_type == "training", "it is listed")


@TRAINING("save_weights_for_sampler", "the checkpoint is listed")
def save_weights_for_sampler(world: World, call: Call) -> None:
    path = call(world.training, world.name()).path
    found = world.listed(path)
    expect(found is not None and found.checkpoint_type == "sampler", "it is listed")


@TRAINING("save_weights_external", "the two PEFT files can be downloaded")
def save_weights_external(world: World, call: Call) -> None:
    path = call(world.training, world.name()).path
    urls = world.rest.get_external_weights_urls(path).result().urls
    expect(set(urls) == {"adapter_config.json", "adapter_model.safetensors"}, "two files")


@TRAINING("save_weights_and_get_sampling_client", "its log-probabilities are those of the trainer")
def save_and_sample(world: World, call: Call) -> None:
    scores = call(world.training).compute_logprobs(prompt()).result()
    trained = world.training.forward([datum()], "cross_entropy").result()
    logprobs = trained.loss_fn_outputs[0]["logprobs"].to_numpy()
    expect(np.allclose(scores[1:], logprobs, atol=1e-3), "sampler and trainer agree")


@TRAINING("create_sampling_client", "its log-probabilities are those of the run that saved it")
def create_sampling_client(world: World, call: Call) -> None:
    client = call(world.training, world.saved("sampler_weights"))
    live = world.training.save_weights_and_get_sampling_client().result()
    scores = [one.compute_logprobs(prompt()).result() for one in (client, live)]
    expect(scores[0] == scores[1], "the same weights")


@TRAINING("load_state", "the loss is that of the checkpoint again")
def load_state(world: World, call: Call) -> None:
    _load(world, call)


@TRAINING("load_state_with_optimizer", "the loss is that of the checkpoint again")
def load_state_with_optimizer(world: World, call: Call) -> None:
    _load(world, call)


@TRAINING("get_info", "base model, rank and run")
def get_info(world: World, call: Call) -> None:
    info = call(world.training)
    expect((info.model_name, info.lora_rank) == (world.model, 4), "model and rank")
    expect(info.model_id == run_of(world.saved()), "the run")


LOSSES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "dro": ("loss_fn_config={'beta': 0.05}; beta has no default", {"beta": 0.05}),
    "gspo": (
        "loss_fn_config={'clip_low_threshold': 0.9, 'clip_high_threshold': 1.1}; they have no "
        "default",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    ),
    "stable_reinforce": ("a stand-in for the hosted objective, which is not published", None),
    "custom": ("", {"loss_id": "0"}),
}
"""What a loss needs in addition to the data: in words, and as it is sent."""


def probe_loss(world: World, name: str) -> None:
    """A pass and a step change the loss of the same tokens."""
    client = world.new_training()
    length = len(TOKENS) - 1
    more: dict[str, Any] = {"weights": np.ones(length, np.float32)}
    if name not in ("cross_entropy", "custom"):
        drawn = client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        more = {"logprobs": drawn.to_numpy(), "advantages": np.ones(length, np.float32)}
    if name == "gspo":
        more["sequence_ratio_mask"] = np.ones(length, np.float32)
    before = loss_of(client)
    config = LOSSES.get(name, ("", None))[1]
    asked: Any = name
    output = client.forward_backward([datum(**more)], asked, config).result()
    expect(np.isfinite(output.metrics["loss:sum"]), "a loss")
    client.optim_step(ADAM).result()
    expect(loss_of(client) < before, "what has an advantage becomes likelier")


def _load(world: World, call: Call) -> None:
    client = world.new_training()
    before, path = loss_of(client), client.save_state(world.name()).result().path
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(ADAM).result()
    expect(loss_of(client) != before, "it went on")
    call(client, path)
    expect(loss_of(client) == before, "it is back")
