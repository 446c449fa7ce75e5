"""Samplers that follow their run, and those that do not; archives by a signed address."""

from __future__ import annotations

import io
import tarfile

import httpx
import pytest
from safetensors.numpy import load


@pytest.fixture
def mine(caller):
    return caller("local")


def _sampler(mine, model: str, number: int, kind: str) -> str:
    made = mine.post(
        "save_weights_for_sampler",
        model_id=model,
        seq_id=number,
        sampling_session_seq_id=number,
        kind=kind,
    )
    return mine.result(made)["sampling_session_id"]


def _scores(mine, sampler: str, number: int) -> list[float]:
    asked = mine.post(
        "asample",
        sampling_session_id=sampler,
        seq_id=number,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 44, 101, 7]}]},
        sampling_params={"max_tokens": 1},
        prompt_logprobs=True,
    )
    return mine.result(asked)["prompt_logprobs"]


def test_inflight_samplers_follow_later_saves_and_snapshots_do_not(mine, stories_model):
    model = mine.model(stories_model)
    first = _sampler(mine, model, 1, "inflight")
    fixed = _sampler(mine, model, 2, "snapshot")
    before = _scores(mine, first, 0)
    assert _scores(mine, fixed, 0) == before
    mine.train(model, 3)
    mine.result(mine.step(model, 4))
    assert _scores(mine, first, 1) == before  # nothing was saved yet
    second = _sampler(mine, model, 5, "inflight")
    after = _scores(mine, second, 0)
    assert after != before
    assert _scores(mine, first, 2) == after
    assert _scores(mine, fixed, 1) == before


def test_runs_do_not_share_inflight_samplers(mine, stories_model):
    session = mine.session()
    one = mine.model(stories_model, session)
    other = mine.result(
        mine.post(
            "create_model",
            session_id=session,
            model_seq_id=1,
            base_model=stories_model,
            lora_config={"rank": 4, "seed": 1},
        )
    )["model_id"]
    follows = _sampler(mine, one, 1, "inflight")
    before = _scores(mine, follows, 0)
    mine.train(other, 1)
    mine.result(mine.step(other, 2))
    _sampler(mine, other, 3, "inflight")
    assert _scores(mine, follows, 1) == before


def test_an_archive_is_fetched_by_an_address_that_needs_no_key(mine, stories_model):
    model = mine.model(stories_model)
    mine.result(mine.post("save_weights", model_id=model, seq_id=1, path="a"))
    place = f"training_runs/{model}/checkpoints/weights"
    answer = mine.http.get(f"{place}/a/archive")
    assert answer.status_code == 302
    address = answer.headers["Location"]
    fetched = httpx.get(address)
    assert fetched.status_code == 200
    with tarfile.open(fileobj=io.BytesIO(fetched.content)) as tar:
        assert sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
        weights = tar.extractfile("adapter_model.safetensors")
        assert weights is not None
        assert load(weights.read())
    assert httpx.get(address[:-1] + ("A" if address[-1] != "A" else "B")).status_code == 404
    assert mine.http.get(f"{place}/b/archive").status_code == 404
