"""Samples that wait are counted once, however they were asked for."""

from __future__ import annotations

import openai
import pytest
from serving import Caller

LONG = {"max_tokens": 500, "seed": 0}


@pytest.fixture
def sdk(oai_serving, stories_model):
    """Samples by the SDK's protocol: ``sdk(number, samples)``."""
    caller = Caller(oai_serving, oai_serving.key())
    session = caller.session()
    asked = caller.post(
        "create_sampling_session",
        session_id=session,
        sampling_session_seq_id=0,
        base_model=stories_model,
    )

    def sample(number: int, samples: int, **params):
        return caller.post(
            "asample",
            sampling_session_id=asked[1]["sampling_session_id"],
            seq_id=number,
            num_samples=samples,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            sampling_params={"stop": [], **LONG, **params},
        )

    sample.result = caller.result
    sample.cancel = lambda said: caller.post("cancel_future", request_id=said["request_id"])
    sample.model = lambda: (caller, caller.model(stories_model, session))
    yield sample
    caller.post(f"sessions/{session}/finish")
    caller.http.close()


def test_samples_of_the_sdk_leave_no_room_for_the_others(sdk, oai, stories_model):
    status, first = sdk(0, 60)
    assert status == 200
    with pytest.raises(openai.RateLimitError):
        oai.completions.create(model=stories_model, prompt="Once", n=60, max_tokens=1)
    assert sdk(1, 60)[0] == 429
    sdk.cancel(first)
    assert len(oai.completions.create(model=stories_model, prompt="Once", n=60).choices) == 60
    assert "sequences" in sdk.result(sdk(2, 60, max_tokens=1))


def test_one_request_has_no_more_samples_than_may_wait(oai_serving, sdk, oai, stories_model):
    begin = oai_serving.cpu_seconds()
    with pytest.raises(openai.BadRequestError, match="for 128000 samples, the limit is 64") as said:
        oai.completions.create(model=stories_model, prompt=[[1]] * 1000, n=128, max_tokens=1)
    assert said.value.param == "n"
    assert oai_serving.cpu_seconds() - begin < 5  # 15 s where all of them were created
    assert sdk(0, 65)[0] == 400


def test_the_samples_of_one_owner_leave_room_for_another(sdk, oai, other, stories_model):
    status, first = sdk(0, 60)
    assert status == 200
    ask = {"model": stories_model, "prompt": "Once", "n": 60, "max_tokens": 1}
    with pytest.raises(openai.RateLimitError):
        oai.completions.create(**ask)
    assert len(other.completions.create(**ask).choices) == 60
    sdk.cancel(first)
