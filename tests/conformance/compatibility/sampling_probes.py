"""Probes of the sampling client, and of arguments that change what a method does."""

from __future__ import annotations

from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from tinker.lib.api_future_impl import QueueState

from tests.conformance.compatibility.probing import Call, Probes, expect
from tests.conformance.compatibility.service_probes import LOCAL
from tests.conformance.compatibility.training_probes import ADAM
from tests.conformance.compatibility.world import TOKENS, World, datum, prompt

SAMPLING, ARGUMENTS, MISTAKES = Probes(), Probes(), Probes()


@SAMPLING("sample", "the requested number of sequences and tokens; a seed is reproducible")
def sample(world: World, call: Call) -> None:
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    drawn = [call(world.sampling, prompt(), 2, params) for _ in range(2)]
    tokens = [[list(one.tokens) for one in response.sequences] for response in drawn]
    expect([len(one) for one in tokens[0]] == [4, 4], "the shape")
    expect(tokens[0] == tokens[1], "the seed")


@SAMPLING("compute_logprobs", "one for each token except the first, equal to those of sampling")
def compute_logprobs(world: World, call: Call) -> None:
    drawn = world.sampling.sample(prompt(), 1, types.SamplingParams(max_tokens=3, stop=[]))
    (sequence,) = drawn.result().sequences
    scores = call(world.sampling, prompt([*TOKENS, *sequence.tokens]))
    expect(scores[0] is None and len(scores) == len(TOKENS) + 3, "one a token")
    expect(np.allclose(scores[-3:], sequence.logprobs or [], atol=1e-3), "what sampling gave")


@SAMPLING("create", "a client of the base model")
def create(world: World, call: Call) -> None:
    made = call(call.of, world.service.holder, base_model=world.model)
    expect(made.get_base_model() == world.model, "the model")


@SAMPLING("get_sampler_handle", LOCAL)
def get_sampler_handle(world: World, call: Call) -> None:
    expect(isinstance(call(world.sampling), str), "a string")


@SAMPLING("from_sampler_handle", "its log-probabilities are those of the client of the handle")
def from_sampler_handle(world: World, call: Call) -> None:
    other = call(call.of, world.sampling.get_sampler_handle(), api_key=world.key)
    scores = [one.compute_logprobs(prompt()).result() for one in (other, world.sampling)]
    expect(scores[0] == scores[1], "the same weights")


@SAMPLING("get_base_model", "the served model")
def get_base_model(world: World, call: Call) -> None:
    expect(call(world.sampling) == world.model, "the model")


@SAMPLING("on_queue_state_change", f"{LOCAL}: the client calls it when the state changes")
def on_queue_state_change(world: World, call: Call) -> None:
    call(world.sampling, QueueState.ACTIVE, None)


@ARGUMENTS("save_weights_and_get_sampling_client(kind='inflight')", "it follows later saves")
def inflight(world: World) -> None:
    client = world.new_training()
    first = client.save_weights_and_get_sampling_client(kind="inflight").result()
    before = first.compute_logprobs(prompt()).result()
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(ADAM).result()
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    expect(first.compute_logprobs(prompt()).result() != before, "newer weights")


@ARGUMENTS("save_state(overwrite=True, ttl_seconds=…)", "the second save replaces the first")
def overwrite(world: World) -> None:
    name = world.name()
    world.training.save_state(name).result()
    path = world.training.save_state(name, overwrite=True, ttl_seconds=7200).result().path
    found = world.listed(path)
    expect(found is not None and found.expires_at is not None, "it expires")


@MISTAKES("save_state with a name that exists", "never")
def taken(world: World) -> None:
    client = world.new_training()
    client.save_state("taken").result()
    client.save_state("taken").result()


@ARGUMENTS("save_weights_external(age_encryption_recipients=…)", "the files are encrypted")
def age(world: World) -> None:
    world.new_training().save_weights_external(world.name(), None, ["age1…"]).result()


@ARGUMENTS("create_lora_training_client(optimizer=DimuonOptimizerConfig())", "a run")
def dimuon_client(world: World) -> None:
    world.new_training(optimizer=types.DimuonOptimizerConfig())


@ARGUMENTS("optim_step(DimuonParams(…))", "a step")
def dimuon_step(world: World) -> None:
    world.new_training().optim_step(types.DimuonParams(learning_rate=1e-2)).result()


@ARGUMENTS("create_training_client_from_state(weights_access_token=…)", "a run")
def access_token(world: World) -> None:
    path = world.saved()
    world.service.create_training_client_from_state(path, weights_access_token="t").result()


@MISTAKES("create_lora_training_client with a model that is not served", "never")
def other_model(world: World) -> None:
    world.service.create_lora_training_client("no/such-model").result()


@ARGUMENTS(
    "sample(include_prompt_logprobs, topk_prompt_logprobs=2)", "two a token except the first"
)
def prompt_scores(world: World) -> None:
    drawn = _sample(world, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    expect(drawn.prompt_logprobs[0] is None, "nothing for the first")
    expect([row and len(row) for row in drawn.topk_prompt_logprobs][1:] == [2] * 4, "two each")


@ARGUMENTS("sample(topk_sample_logprobs=2)", "two for each sampled token, the most probable first")
def sample_scores(world: World) -> None:
    (sequence,) = _sample(world, topk_sample_logprobs=2).sequences
    rows = sequence.topk_logprobs_np.logprobs
    expect(rows.shape == (2, 2) and (rows[:, 0] >= rows[:, 1]).all(), "two each")


@ARGUMENTS(
    "sample(target_prompt_logprobs=…)",
    "equal to the prompt's log-probabilities",
)
def target_scores(world: World) -> None:
    asked = types.TensorData.from_torch(torch.tensor([[token] for token in TOKENS[1:]]))
    drawn = _sample(world, include_prompt_logprobs=True, target_prompt_logprobs=asked)
    found = drawn.target_prompt_logprobs.to_numpy()[:, 0]
    expect(np.allclose(found, drawn.prompt_logprobs[1:], atol=1e-4), "the prompt's scores")


@ARGUMENTS("sample(prompt_logprobs_last_n=2)", "only the last two")
def last_scores(world: World) -> None:
    drawn = _sample(world, include_prompt_logprobs=True, prompt_logprobs_last_n=2)
    known = [one is not None for one in drawn.prompt_logprobs]
    expect(known == [False, False, False, True, True], "two")


@ARGUMENTS("sample(prompt_alt_tokens_k=2)", "two drawn tokens a place")
def alternatives(world: World) -> None:
    _sample(world, prompt_alt_tokens_k=2)


@ARGUMENTS("create_sampling_client(record_stability_info=True), sample", "a sample")
def stability(world: World) -> None:
    made = world.service.create_sampling_client(
        base_model=world.model, record_stability_info=True
    ).result()
    made.sample(prompt(), 1, types.SamplingParams(max_tokens=1)).result()


@ARGUMENTS("sample(prompt with an image) of a text model", "never")
def image_sample(world: World) -> None:
    params = types.SamplingParams(max_tokens=1)
    world.sampling.sample(_with_image(), 1, params).result()


@ARGUMENTS("forward(datum with an image) of a text model", "never")
def image_pass(world: World) -> None:
    one = datum()
    seen = types.Datum(model_input=_with_image(), loss_fn_inputs=one.loss_fn_inputs)
    world.new_training().forward([seen], "cross_entropy").result()


@MISTAKES("forward with weights of a wrong shape", "never")
def bad_data(world: World) -> None:
    wrong = datum(weights=np.ones(2, np.float32))
    world.new_training().forward([wrong], "cross_entropy").result()


@MISTAKES("create_sampling_client with an unknown path", "never")
def no_checkpoint(world: World) -> None:
    path = f"tinker://{world.new_training().model_id}/weights/none"
    world.service.create_sampling_client(model_path=path).result()


@ARGUMENTS("list_training_runs(project_id=…)", "the project's runs")
def project_runs(world: World) -> None:
    world.rest.list_training_runs(project_id="p").result()


@ARGUMENTS("ServiceClient(project_id=…)", "no effect, with a warning")
def project(world: World) -> None:
    with tinker.ServiceClient(project_id="p") as service:
        made = service.create_sampling_client(base_model=world.model).result()
        expect(made.get_base_model() == world.model, "a client")


def _sample(world: World, **more: Any) -> Any:
    params = types.SamplingParams(max_tokens=2, stop=[])
    return world.sampling.sample(prompt(), 1, params, **more).result()


def _with_image() -> types.ModelInput:
    text = types.EncodedTextChunk(tokens=TOKENS[:-1])
    return types.ModelInput(chunks=[text, types.ImageChunk(data=b"unread", format="png")])
