"""Requests for samples that somebody no longer waits for."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest
import tinker
import torch

from tinker_cookbook.backends import connect
from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.sampling.scoring import Scorer

SHORT = tinker.SamplingParams(max_tokens=1, seed=0)
LONG = tinker.SamplingParams(max_tokens=400, seed=0, stop=[])


@pytest.fixture
def service(stories_model):
    connection = connect("local", device="cpu", dtype="float32")
    with connection.service as service:
        yield service


def running(service) -> int:
    return sum(len(b._all_rows()) for b in service.engine._schedulers.values())


def wait_until(condition) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.002)


@pytest.fixture
def client(service, stories_model):
    return service.create_sampling_client(base_model=str(stories_model)).result()


def ask(client, **kwargs):
    return client.sample(tinker.ModelInput.from_ints([1]), 4, LONG, **kwargs)


def test_cancelling_frees_what_it_held(service, client):
    future = ask(client).future()
    wait_until(lambda: running(service))
    assert future.cancel()
    wait_until(lambda: not running(service))


def test_a_client_that_goes_away_frees_what_it_held(service, client):
    future = ask(client)
    wait_until(lambda: running(service))
    del future
    gc.collect()
    wait_until(lambda: not running(service))


def test_a_cancelled_task_frees_what_it_held(service, client):
    async def give_up() -> None:
        async with asyncio.timeout(0.05):
            await ask(client)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    gc.collect()
    wait_until(lambda: not running(service))


def test_prompt_scores_come_with_the_samples(client):
    prompt = tinker.ModelInput.from_ints([1, 5, 9, 12])
    response = client.sample(
        prompt, 1, LONG, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result(60)
    alone = client.compute_logprobs(prompt).result(60)
    assert response.prompt_logprobs == alone
    assert len(response.topk_prompt_logprobs) == 4


def test_a_bad_request_fails_by_itself(client):
    with pytest.raises(ValueError, match="temperature"):
        client.sample(
            tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(temperature=-1)
        ).result(60)
    assert ask(client).result(60).sequences


def test_target_scores_come_with_the_samples(client):
    prompt = tinker.ModelInput.from_ints([1, 5, 9, 12])
    asked = tinker.TensorData.from_torch(torch.tensor([[5, 7], [9, -1], [12, 3]]))
    response = client.sample(prompt, 1, SHORT, target_prompt_logprobs=asked).result(60)
    found = response.target_prompt_logprobs.to_numpy()
    assert found[:, 0].tolist() == client.compute_logprobs(prompt).result(60)[1:]
    assert found[1, 1] == 0
    assert (found[[0, 2], 1] < 0).all()


@pytest.mark.parametrize("ids", [[1], [1, 5, 9, 12]])
def test_a_single_token_is_drawn_in_the_pass_that_scores(service, client, ids, monkeypatch):
    prompt = tinker.ModelInput.from_ints(ids)
    one = tinker.SamplingParams(max_tokens=1, temperature=1.0, seed=3)
    alone = client.sample(prompt, 3, one, topk_sample_logprobs=2).result(60)
    scores = client.compute_logprobs(prompt).result(60)
    monkeypatch.setattr(service.engine, "sample", lambda _: pytest.fail("a second pass"))
    wanted = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    futures = [client.sample(prompt, 3, one, topk_sample_logprobs=2, **wanted) for _ in range(4)]
    for future in futures:
        response = future.result(60)
        assert response.prompt_logprobs == scores
        assert len(response.topk_prompt_logprobs) == len(ids)
        for found, expected in zip(response.sequences, alone.sequences, strict=True):
            assert found.tokens == expected.tokens
            assert found.logprobs == expected.logprobs
            assert found.topk_logprobs == expected.topk_logprobs
            assert found.stop_reason == "length"


def test_without_its_scores_a_sample_is_not_drawn(client):
    bad = client.sample(
        tinker.ModelInput.from_ints([1, 5]),
        1,
        LONG,
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=9,
    )
    with pytest.raises(ValueError, match="last_n: got 9"):
        bad.result(60)


def test_a_client_is_made_beside_the_queue_of_another_owner(
    service, client, stories_model, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        Scorer, "_groups", lambda self, base, asked: [[i] for i in range(len(asked))]
    )
    held = threading.Event()
    service.engine.submit(held.wait, 60)
    prompt = tinker.ModelInput.from_ints([1, 5])
    queued = [client.compute_logprobs(prompt).future() for _ in range(20)]
    clients = [service.create_sampling_client(base_model=str(stories_model)) for _ in range(20)]
    queued += [one.future() for one in clients]
    store = CheckpointStore(tmp_path, owner="ann")
    made = LocalSamplingClient.open(service.engine, store, None, str(stories_model)).future()
    left: list[int] = []
    made.add_done_callback(lambda _: left.append(sum(not one.done() for one in queued)))
    held.set()
    made.result(60)
    assert left[0] > 30


def test_weights_are_freed_without_the_garbage_collector(service, stories_model):
    """Also if requests were sent before the client was made."""
    held = threading.Event()
    gc.collect()
    gc.disable()
    try:
        service.engine.submit(held.wait, 60)
        client = service.create_sampling_client(base_model=str(stories_model))
        prompt = tinker.ModelInput.from_ints([1, 5])
        ready = client.future()
        asked = [client.sample(prompt, 1, SHORT, include_prompt_logprobs=i > 0) for i in range(2)]
        asked.append(client.compute_logprobs(prompt))
        held.set()
        answers = [weakref.ref(future.result(60)) for future in asked[:2]]
        asked[2].result(60)
        freed = [weakref.ref(client), weakref.ref(client.sampler()), *answers]
        del client, ready, asked
        wait_until(lambda: not any(one() for one in freed))
    finally:
        held.set()
        gc.enable()


def test_a_prompt_may_be_a_text(client):
    text = "Once upon a time"
    tokens = tinker.ModelInput.from_ints(client.get_tokenizer().encode(text))
    answers = [client.sample(prompt, 1, SHORT).result() for prompt in (text, tokens)]
    assert answers[0].sequences[0].tokens == answers[1].sequences[0].tokens
