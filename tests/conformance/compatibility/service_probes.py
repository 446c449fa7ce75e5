"""Probes of the service client, of futures, and of the SDK's module of credentials."""

from __future__ import annotations

import asyncio

import tinker
import torch
from tinker import types

from tests.conformance.compatibility.probing import Call, Probes, expect
from tests.conformance.compatibility.world import World, datum, loss_of, prompt

SERVICE, FUTURE, LOSS, AUTH = Probes(), Probes(), Probes(), Probes()

LOCAL = "no request to the server"


@SERVICE("close", "the server has closed the session")
def close(world: World, call: Call) -> None:
    service = tinker.ServiceClient()
    session = service.holder.get_session_id()
    expect(session in world.rest.list_sessions().result().sessions, "it is listed")
    call(service, "success")
    expect(session not in world.rest.list_sessions().result().sessions, "it is gone")


@SERVICE("copy_weights", "the copy is listed")
def copy_weights(world: World, call: Call) -> None:
    with tinker.ServiceClient(project_id="p") as service:
        path = call(service, world.saved())
    expect(world.listed(path), "the copy is listed")


def negative_sum(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple:
    """A loss that is also built in."""
    loss = -(logprobs * weights).sum()
    return loss, {"custom/half:sum": loss / 2}


@SERVICE("create_custom_loss", "loss and gradient equal those of the built-in loss")
def create_custom_loss(world: World, call: Call) -> None:
    handle = call(world.service, negative_sum, {"logprobs": 1, "weights": 1})
    expect(handle.loss_id is None, "it was not uploaded")
    ours, theirs = world.new_training(), world.new_training()
    output = ours.forward_backward_custom([datum()], handle).result()
    loss = theirs.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"]
    expect(abs(output.metrics["custom/half:sum"] - loss / 2) < 1e-3, "the metric is the client's")
    for client in (ours, theirs):
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    expect(abs(loss_of(ours) - loss_of(theirs)) < 1e-3, "the step is the same")


@SERVICE("create_lora_training_client", "rank and base model are as requested")
def create_lora_training_client(world: World, call: Call) -> None:
    info = call(world.service, world.model, rank=3).get_info()
    expect((info.lora_rank, info.model_name) == (3, world.model), "what was asked for")


@SERVICE("create_training_client_from_state", "the loss equals that of the run that saved it")
def create_from_state(world: World, call: Call) -> None:
    client = call(world.service, world.saved())
    expect(loss_of(client) == loss_of(world.training), "the same weights")


@SERVICE(
    "create_training_client_from_state_with_optimizer",
    "the next step equals that of the run that saved it",
)
def create_with_optimizer(world: World, call: Call) -> None:
    begun = world.new_training()
    _step(begun)
    again = call(world.service, begun.save_state(world.name()).result().path)
    _step(begun)
    _step(again)
    expect(loss_of(again) == loss_of(begun), "it goes on as if never stopped")


@SERVICE(
    "create_sampling_client",
    "a checkpoint's log-probabilities differ from the base model's",
)
def create_sampling_client(world: World, call: Call) -> None:
    of_run = call(world.service, model_path=world.saved("sampler_weights"))
    plain = call(world.service, base_model=world.model)
    scores = [one.compute_logprobs(prompt()).result() for one in (of_run, plain)]
    expect(scores[0] != scores[1], "trained weights score otherwise")


@SERVICE("create_rest_client", "it lists the session's runs")
def create_rest_client(world: World, call: Call) -> None:
    run = world.training.model_id
    runs = call(world.service).list_training_runs().result().training_runs
    expect(run in [one.training_run_id for one in runs], "it lists this run")


@SERVICE("holder", f"{LOCAL} except for the session")
def holder(world: World, call: Call) -> None:
    expect(world.service.holder.get_session_id(), "a session")


@FUTURE("result", "the loss of a pass")
def result(world: World, call: Call) -> None:
    _check(call(_pass(world)))


@FUTURE("future", "a `concurrent.futures` future with the result")
def future(world: World, call: Call) -> None:
    _check(call(_pass(world)).result(60))


@FUTURE("coroutine", "a coroutine that returns the result")
def coroutine(world: World, call: Call) -> None:
    _check(call(_pass(world)))


@LOSS("input_names", LOCAL)
@LOSS("key", LOCAL)
@LOSS("loss_id", "none: the loss is computed in the client")
def loss_handle(world: World, call: Call) -> None:
    known = {"input_names": (), "loss_id": None, "key": world.loss.key}
    expect(len(known["key"]) == 64 and getattr(world.loss, call.name) == known[call.name], "it")


@AUTH("get_tinker_token", LOCAL)
def get_tinker_token(world: World, call: Call) -> None:
    expect(call(tinker.auth) == world.key, "the key")


@AUTH("tinker_has_credentials", LOCAL)
def tinker_has_credentials(world: World, call: Call) -> None:
    expect(call(tinker.auth) is True, "there is a key")


@AUTH("raise_if_tinker_not_accessible", "no error with the key, an error with another key")
def raise_if_not_accessible(world: World, call: Call) -> None:
    call(tinker.auth)
    try:
        tinker.RestClient(api_key="tml-wrong").get_server_capabilities().result()
    except tinker.AuthenticationError:
        return
    expect(False, "a wrong key is told")


def _pass(world: World) -> tinker.APIFuture:
    return world.training.forward([datum()], "cross_entropy")


def _check(output: types.ForwardBackwardOutput) -> None:
    expect(output.metrics["loss:sum"] > 0, "a loss")


def _step(client: tinker.TrainingClient) -> None:
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()


async def awaited(world: World) -> float:
    """A pass by ``await``, which is no method by name."""
    return (await _pass(world)).metrics["loss:sum"]


@FUTURE("__await__", "the loss of a pass")
def dunder_await(world: World, call: Call) -> None:
    expect(asyncio.run(awaited(world)) > 0, "a loss")
