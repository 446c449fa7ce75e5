"""Passes of the local training client that fail before the engine computes anything."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tinker
from tinker import types

from tinker_cookbook.backends.local import LocalServiceClient
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.exceptions import BackendError, DataValidationError, TrainingError

SECONDS = 60
INPUTS = {
    "target_tokens": tinker.TensorData(data=[44, 101, 7], dtype="int64", shape=[3]),
    "weights": tinker.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
}


def datum(*chunks: tinker.ModelInputChunk, **inputs: tinker.TensorData) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput(chunks=list(chunks)), loss_fn_inputs=inputs)


TEXT = types.EncodedTextChunk(tokens=[1, 44, 101])
IMAGE = types.ImageAssetPointerChunk(location="x", format="png", expected_tokens=3)


@pytest.mark.parametrize("joint", ["false", "true"])
def test_a_pass_that_cannot_start_makes_the_next_step_fail(
    stories_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joint: str
) -> None:
    """With ``joint`` the passes of two clients wait at the same time."""
    engine = Engine("cpu", "float32", joint_training=joint)
    with LocalServiceClient(engine, CheckpointStore(tmp_path)) as service:
        clients = [service.create_lora_training_client(stories_model, 2) for _ in range(2)]
        first, second = clients
        for client in clients:
            client.get_info()
        text = datum(TEXT, **INPUTS)

        def step_after_failure(error: type[Exception], custom: bool, bad: tinker.Datum) -> None:
            go_on = threading.Event()
            engine.submit(go_on.wait, SECONDS)
            second.forward_backward([text], "cross_entropy")
            first.forward_backward([text], "cross_entropy")
            if custom:
                failing = first.forward_backward_custom([bad], lambda data, lps: (lps[0].sum(), {}))
            else:
                # These two wait at the same time, so they may be computed together.
                failing = first.forward_backward([bad], "cross_entropy")
                second.forward_backward([text], "cross_entropy")
            steps = [client.optim_step() for client in clients]
            go_on.set()
            with pytest.raises(error) as caught:
                failing.result(SECONDS)
            with pytest.raises(
                TrainingError, match="a forward_backward since the last step"
            ) as step:
                steps[0].result(SECONDS)
            assert str(caught.value) in str(step.value)

        step_after_failure(DataValidationError, False, datum(IMAGE, **INPUTS))
        step_after_failure(DataValidationError, True, datum(TEXT))

        def cannot_begin() -> None:
            raise BackendError("no room for a pass")

        monkeypatch.setattr(engine, "begin_pass", cannot_begin)
        step_after_failure(BackendError, False, text)
        step_after_failure(BackendError, True, text)
