"""Owners who sample at the same time: bad requests fail alone, and no owner waits for another."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import Caller

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 44, 101]}]}


def sampler(caller: Caller, base_model: str) -> str:
    """A sampler of the base model, in a session of its own."""
    made = caller.post("create_sampling_session", session_id=caller.session(),
                       sampling_session_seq_id=0, base_model=base_model)  # fmt: skip
    assert made[1] is not None
    return made[1]["sampling_session_id"]


def draw(caller: Caller, of: str, number: int, samples: int, **settings):
    """Asks for samples; ``caller.result`` waits for them."""
    return caller.post("asample", sampling_session_id=of, seq_id=number, prompt=PROMPT,
                       num_samples=samples, sampling_params={"seed": 0, **settings})  # fmt: skip


@pytest.fixture
def ann(caller, stories_model):
    """``ann(bad)`` samples while ``bad()`` runs, and has drawn what she draws alone."""
    her = caller("ann")
    of = sampler(her, stories_model)
    settings = {"max_tokens": 120, "stop": []}
    alone = her.result(draw(her, of, 0, 4, **settings))["sequences"]

    def while_running(bad):
        asked = draw(her, of, 1, 4, **settings)
        said = bad()
        found = her.result(asked)["sequences"]
        assert [one["tokens"] for one in found] == [one["tokens"] for one in alone]
        return said

    return while_running


def test_samples_of_a_diverged_run_fail_alone(serving, caller, ann, stories_model):
    bob = caller("local")
    model = bob.model(stories_model)
    bob.result(bob.train(model, 1))
    # Weights that float32 holds, else the step is refused; their squares are beyond it.
    far = {"learning_rate": 1e30}
    stepped = bob.result(bob.post("optim_step", model_id=model, seq_id=2, adam_params=far))
    assert "error" not in stepped
    asked = bob.post("save_weights_for_sampler", model_id=model, seq_id=3,
                     sampling_session_seq_id=0)  # fmt: skip
    of = bob.result(asked)["sampling_session_id"]
    said = ann(lambda: bob.result(draw(bob, of, 1, 2, max_tokens=8)))
    assert said["category"] == "user"
    assert model in said["error"]
    saved = bob.post("save_weights_for_sampler", model_id=model, seq_id=4, path="diverged")
    answer = httpx.post(
        f"{serving.url}/oai/api/v1/completions",
        json={"model": bob.result(saved)["path"], "prompt": "x", "max_tokens": 3},
        headers={"X-API-Key": serving.key()},
        timeout=60,
    )
    assert answer.status_code == 400
    assert model in answer.json()["error"]["message"]


def test_a_small_request_does_not_wait_for_anothers_crowd(caller, stories_model):
    """3 s: 1,024 samples of 120 tokens are asked for and taken back."""
    ann, bob = caller("ann"), caller("local")
    crowd, alone = sampler(ann, stories_model), sampler(bob, stories_model)
    bob.result(draw(bob, alone, 0, 1, max_tokens=4))
    asked = draw(ann, crowd, 1, 1024, max_tokens=120, stop=[])
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(ann.result, asked)
        time.sleep(0.5)  # her samples fill the batch
        bob.result(draw(bob, alone, 1, 1, max_tokens=4))
        assert not ended.done()  # after 46 s, where everybody stood in one line
        ann.post("cancel_future", request_id=f"{crowd}:1")
        assert "cancelled" in ended.result()["error"]
