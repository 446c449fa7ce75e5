"""What every backend must do, asked through the SDK's own types."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tinker_cookbook.exceptions import TinkerCookbookError


def datum(tokens: list[int], weights: list[float] | None = None) -> tinker.Datum:
    targets = tokens[1:]
    return tinker.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(targets),
            "weights": np.array(weights or [1.0] * len(targets), dtype=np.float32),
        },
    )


DATA = [datum([1, 44, 101, 7, 9, 300]), datum([1, 20, 21, 22])]
ADAM = types.AdamParams(learning_rate=1e-2)


def logprobs(output) -> list[np.ndarray]:
    return [record["logprobs"].to_numpy() for record in output.loss_fn_outputs]


def client_of(backend, **kwargs):
    service, model = backend
    return service.create_lora_training_client(model, rank=4, seed=0, **kwargs).result()


def test_loss_is_the_sum_over_tokens(backend):
    output = client_of(backend).forward_backward(DATA, "cross_entropy").result()
    by_hand = -sum(float(values.sum()) for values in logprobs(output))
    assert output.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)
    assert [len(values) for values in logprobs(output)] == [5, 3]


def test_a_step_lowers_the_loss_and_forward_changes_nothing(backend):
    client = client_of(backend)
    first = client.forward_backward(DATA, "cross_entropy")
    client.optim_step(ADAM)
    second = client.forward(DATA, "cross_entropy")
    third = client.forward(DATA, "cross_entropy")
    assert second.result().metrics["loss:sum"] < first.result().metrics["loss:sum"]
    assert second.result().metrics == third.result().metrics


def test_operations_run_in_the_order_of_submission(backend):
    """A state saved between two submitted steps holds the first alone."""
    service, _ = backend
    client = client_of(backend)
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(ADAM)
    saved = client.save_state("after-one")
    after_one = client.forward(DATA, "cross_entropy")
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(ADAM)
    after_two = client.forward(DATA, "cross_entropy").result()
    restored = service.create_training_client_from_state(saved.result().path).result()
    again = restored.forward(DATA, "cross_entropy").result()
    assert again.metrics["loss:sum"] == pytest.approx(after_one.result().metrics["loss:sum"])
    assert after_two.metrics["loss:sum"] < again.metrics["loss:sum"]


def test_state_with_optimizer_goes_on_as_if_never_stopped(backend):
    service, _ = backend
    client = client_of(backend)

    def step(c):
        c.forward_backward(DATA, "cross_entropy")
        return c.optim_step(ADAM)

    step(client)
    path = client.save_state("one").result().path
    step(client).result()
    straight = client.forward(DATA, "cross_entropy").result()
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    step(resumed).result()
    fresh = service.create_training_client_from_state(path).result()
    step(fresh).result()
    with_optimizer = resumed.forward(DATA, "cross_entropy").result()
    without = fresh.forward(DATA, "cross_entropy").result()
    assert with_optimizer.metrics["loss:sum"] == straight.metrics["loss:sum"]
    assert without.metrics["loss:sum"] != straight.metrics["loss:sum"]


def test_custom_loss_equals_the_built_in_one(backend):
    def cross_entropy(data, values):
        weights = [d.loss_fn_inputs["weights"].to_torch() for d in data]
        loss = -sum((v * w).sum() for v, w in zip(values, weights, strict=True))
        return loss, {"half": float(loss) / 2}

    built_in, custom = client_of(backend), client_of(backend)
    built_in.forward_backward(DATA, "cross_entropy")
    built_in.optim_step(ADAM).result()
    output = custom.forward_backward_custom(DATA, cross_entropy).result()
    custom.optim_step(ADAM).result()
    assert output.metrics["half"] == pytest.approx(output.metrics["loss:sum"] / 2)
    expected = logprobs(built_in.forward(DATA, "cross_entropy").result())
    got = logprobs(custom.forward(DATA, "cross_entropy").result())
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


class PairLoss:
    """A sum over pairs of datums, which says so."""

    group_size = 2

    def __call__(self, data, values):
        scores = torch.stack([v.sum() for v in values])
        weights = torch.tensor([float(len(d.model_input.to_ints())) for d in data[::2]])
        margins = scores[::2] - scores[1::2]
        loss = -(torch.nn.functional.logsigmoid(margins) * weights).sum()
        return loss, {"pairs": float(len(margins))}


def test_a_custom_loss_over_groups_equals_that_of_the_whole_batch(backend):
    data = [*DATA, datum([1, 9, 8, 7, 6]), datum([1, 9, 8, 5])]
    grouped, whole = client_of(backend), client_of(backend)
    found = grouped.forward_backward_custom(data, PairLoss()).result()
    expected = whole.forward_backward_custom(data, lambda d, v: PairLoss()(d, v)).result()
    assert found.metrics["pairs"] == expected.metrics["pairs"] == 2
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    for client in (grouped, whole):
        client.optim_step(ADAM).result()
    after = [logprobs(c.forward(data, "cross_entropy").result()) for c in (grouped, whole)]
    for output in (found, expected):
        assert [len(values) for values in logprobs(output)] == [5, 3, 4, 3]
    for a, b in zip(*after, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_scores_asked_for_at_once_are_those_of_each(backend):
    service, model = backend
    client = service.create_sampling_client(base_model=model).result()
    prompts = [types.ModelInput.from_ints([1, 44, 101, *range(5, 5 + i)]) for i in range(8)]
    together = [future.result() for future in [client.compute_logprobs(p) for p in prompts]]
    alone = [client.compute_logprobs(prompt).result() for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert a[0] is None
        np.testing.assert_allclose(a[1:], b[1:], atol=1e-5)


def test_a_sampling_client_is_a_snapshot(backend):
    client = client_of(backend)
    prompt = types.ModelInput.from_ints([1, 44, 101, 7])
    before = client.save_weights_and_get_sampling_client().result()
    first = before.compute_logprobs(prompt).result()
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(ADAM).result()
    after = client.save_weights_and_get_sampling_client().result()
    assert before.compute_logprobs(prompt).result() == first
    assert after.compute_logprobs(prompt).result() != first


def test_samples_have_the_asked_shape_and_logprobs(backend):
    service, model = backend
    client = service.create_sampling_client(base_model=model).result()
    prompt = types.ModelInput.from_ints([1, 44, 101, 7])
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3, stop=[])
    response = client.sample(
        prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    assert [len(s.tokens) for s in response.sequences] == [6, 6, 6]
    assert all(s.stop_reason == "length" for s in response.sequences)
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    assert len(response.prompt_logprobs) == 4
    assert len(response.topk_prompt_logprobs[2]) == 2
    whole = types.ModelInput.from_ints([1, 44, 101, 7, *response.sequences[0].tokens])
    scored = client.compute_logprobs(whole).result()
    np.testing.assert_allclose(scored[4:], response.sequences[0].logprobs, atol=1e-4)


def test_no_two_sequences_of_any_clients_have_the_same_id(backend):
    service, model = backend
    client = service.create_sampling_client(base_model=model, record_stability_info=True).result()
    other = service.create_sampling_client(base_model=model).result()
    prompt, params = types.ModelInput.from_ints([1, 44]), types.SamplingParams(max_tokens=1)
    responses = [client.sample(prompt, count, params).result() for count in (3, 1, 2)]
    responses.append(other.sample(prompt, 3, params).result())
    ids = [sequence.sequence_id for r in responses for sequence in r.sequences]
    assert len(set(ids)) == 9


def test_saved_sampler_weights_sample_like_the_live_ones(backend):
    service, _ = backend
    client = client_of(backend)
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(ADAM)
    path = client.save_weights_for_sampler("s").result().path
    live = client.save_weights_and_get_sampling_client().result()
    saved = service.create_sampling_client(model_path=path).result()
    prompt = types.ModelInput.from_ints([1, 44, 101, 7])
    assert saved.compute_logprobs(prompt).result() == live.compute_logprobs(prompt).result()


def test_info_and_tokenizer(backend):
    client = client_of(backend)
    info = client.get_info()
    assert info.is_lora
    assert info.lora_rank == 4
    assert client.get_tokenizer().encode("a")


def test_checkpoints_are_listed_and_deleted(backend):
    service, _ = backend
    client = client_of(backend)
    path = client.save_state("mine", ttl_seconds=7200).result().path
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(path).result()
    listed = rest.list_checkpoints(run.training_run_id).result().checkpoints
    assert [c.tinker_path for c in listed] == [path]
    assert listed[0].expires_at is not None
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(run.training_run_id).result().checkpoints == []


def test_futures_can_be_awaited_and_older_spellings_work(backend):
    service, model = backend

    async def run() -> tuple[float, float]:
        client = await service.create_lora_training_client(model, rank=4, seed=0)
        new = await client.forward_backward(DATA, "cross_entropy")
        await client.optim_step(ADAM)
        old = await (await client.forward_async(DATA, "cross_entropy"))
        sampler = await client.save_weights_and_get_sampling_client_async()
        params = types.SamplingParams(max_tokens=2)
        await sampler.sample_async(types.ModelInput.from_ints([1, 2]), 1, params)
        return new.metrics["loss:sum"], old.metrics["loss:sum"]

    before, after = asyncio.run(run())
    assert after < before


def test_several_runs_share_a_base_model_without_touching_each_other(backend):
    one, two = client_of(backend), client_of(backend)
    untouched = two.forward(DATA, "cross_entropy").result().metrics
    one.forward_backward(DATA, "cross_entropy")
    one.optim_step(ADAM).result()
    assert two.forward(DATA, "cross_entropy").result().metrics == untouched


def test_bad_data_is_refused_and_adds_nothing(backend):
    client = client_of(backend)
    bad = datum([1, 5, 10**6, 3])
    with pytest.raises((TinkerCookbookError, tinker.TinkerError)):
        client.forward_backward([*DATA, bad], "cross_entropy").result()


def test_loss_with_k_targets_a_position(backend):
    """Two targets with half the weight each: the mean of the two losses."""
    client = client_of(backend)
    tokens = [1, 44, 101, 7]

    def loss(targets, weights) -> float:
        d = tinker.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={
                "target_tokens": torch.tensor(targets),
                "weights": torch.tensor(weights),
            },
        )
        return client.forward([d], "cross_entropy").result().metrics["loss:sum"]

    a, b = [5, 6, 7, 8], [9, 10, 11, 12]
    both = loss([[x, y] for x, y in zip(a, b, strict=True)], [[0.5, 0.5]] * 4)
    assert both == pytest.approx((loss(a, [1.0] * 4) + loss(b, [1.0] * 4)) / 2, rel=1e-5)
