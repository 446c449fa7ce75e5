"""Truncated importance sampling, and a run whose sampler is a server of its own (8 s)."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
from animal_stories import story_config
from fake_vllm import FakeVLLM, Transformers
from train_runs import adapter, rows, run, without_times

from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.data_processing import SAMPLER_LOGPROBS, data_for_loss
from tinker_cookbook.rl.loop.importance import RatioStatistics, truncate_importance
from tinker_cookbook.rl.metrics import compute_kl_sample_train

MASK, ADVANTAGES = [0.0, 1.0, 1.0, 1.0], [0.0, 2.0, -1.0, 0.5]
SAMPLER, TRAINER = [0.0, -1.0, -3.0, -2.0], [-5.0, -1.5, -1.0, -2.0]
CAP = 3.0


def datum() -> tinker.Datum:
    values = {"mask": MASK, "advantages": ADVANTAGES, "logprobs": SAMPLER}
    fields = {
        name: tinker.TensorData.from_numpy(np.array(row, dtype=np.float32))
        for name, row in values.items()
    }
    fields["target_tokens"] = tinker.TensorData.from_numpy(np.array([4, 5, 6, 7]))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([3, 4, 5, 6]), loss_fn_inputs=fields
    )


class Trainer:
    """A training client whose policy gives ``TRAINER``."""

    def __init__(self) -> None:
        self.passes: list[set[str]] = []

    def forward(self, data, loss_fn, loss_fn_config=None):
        self.passes += [set(one.loss_fn_inputs) for one in data]
        logprobs = tinker.TensorData.from_numpy(np.array(TRAINER, dtype=np.float32))
        found = SimpleNamespace(loss_fn_outputs=[{"logprobs": logprobs} for _ in data])

        async def wait():
            return found

        return wait()


def test_the_formula():
    """A * min(p / q, cap), and the trainer's log-probabilities in place of the sampler's."""
    trainer, statistics = Trainer(), RatioStatistics()
    (found,) = asyncio.run(truncate_importance(trainer, [datum()], CAP, statistics))
    fields = {name: np.array(value.tolist()) for name, value in found.loss_fn_inputs.items()}
    ratios = [np.exp(-0.5), np.exp(2.0), 1.0]
    expected = [0, 2.0 * ratios[0], -1.0 * CAP, 0.5]
    np.testing.assert_allclose(fields["advantages"], expected, rtol=1e-6)
    np.testing.assert_allclose(fields["logprobs"], [0.0, *TRAINER[1:]])
    assert statistics.metrics() == pytest.approx(
        {
            "optim/importance_ratio": np.mean(ratios),
            "optim/importance_ratio_max": ratios[1],
            "optim/frac_truncated": 1 / 3,
        }
    )
    # The losses do not get the sampler's, and the metrics still compare with it.
    assert trainer.passes == [{"target_tokens", "advantages", "logprobs"}]
    assert SAMPLER_LOGPROBS not in data_for_loss([found], "ppo")[0].loss_fn_inputs
    assert compute_kl_sample_train([found], [TRAINER]) == compute_kl_sample_train(
        [datum()], [TRAINER]
    )
    assert asyncio.run(truncate_importance(trainer, [], CAP, RatioStatistics())) == []
    assert RatioStatistics().metrics() == {}


def wrong_sampler(monkeypatch, by: float) -> None:
    """Samples report log-probabilities that are too low, as a sampler that differs would."""
    from tinker_cookbook.backends import convert

    original = convert.sample_response_of

    def wrong(samples, *args, **kwargs):
        for sample in samples:
            offsets = np.where(np.arange(len(sample.logprobs)) % 2, -by, by / 4)
            sample.logprobs = (np.array(sample.logprobs) + offsets).tolist()
        return original(samples, *args, **kwargs)

    monkeypatch.setattr(convert, "sample_response_of", wrong)


def test_the_gradient_is_that_of_truncated_weights(stories_model, tmp_path, monkeypatch):
    """``cispo`` multiplies the same truncated ratio into the gradient, by the engine's loss."""
    data = {"num_batches": 1, "groups_per_batch": 2, "reward_for": "length"}

    def one_step(name: str, **settings) -> tuple[dict, dict]:
        config = story_config(stories_model, tmp_path / name, data, save_every=1, **settings)
        (row,) = run(config)
        return row, adapter(tmp_path / name)

    # A sampler that equals the trainer has ratios of 1: nothing changes.
    same, _ = one_step("same", importance_ratio_cap=2.0)
    assert same["optim/importance_ratio_max"] == pytest.approx(1, abs=1e-4)
    assert same["optim/frac_truncated"] == 0

    wrong_sampler(monkeypatch, 1.0)
    capped, capped_adapter = one_step("capped", importance_ratio_cap=2.0)
    bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}
    cispo, cispo_adapter = one_step("cispo", loss_fn="cispo", loss_fn_config=bounds)
    assert capped["optim/frac_truncated"] == pytest.approx(0.5, abs=0.01)
    assert capped["optim/importance_ratio_max"] == pytest.approx(np.e, rel=1e-3)
    assert capped["optim/grad_norm"] == pytest.approx(cispo["optim/grad_norm"], rel=1e-4)
    assert abs(same["optim/grad_norm"] / capped["optim/grad_norm"] - 1) > 0.01
    for name, tensor in capped_adapter.items():
        np.testing.assert_allclose(tensor, cispo_adapter[name], atol=1e-5)
    # What differs is reported as it is, corrected or not.
    kl = "optim/kl_sample_train_v1"
    assert capped[kl] == pytest.approx(cispo[kl], rel=1e-5)


def test_a_run_samples_in_a_server_and_goes_on_after_it_was_gone(stories_model, tmp_path):
    """The interrupted run ends with the rows of one whose server never ended (4 s)."""
    data = {"num_batches": 2, "groups_per_batch": 2, "reward_for": "length"}
    settings = {"save_every": 1, "importance_ratio_cap": 2.0}
    with FakeVLLM(Transformers(stories_model), root=stories_model) as server:
        whole = run(
            story_config(stories_model, tmp_path / "a", data, sampler=server.url, **settings)
        )
        assert len({body["model"] for body in server.bodies}) == 2
        # A thread unloads the last adapter after the run.
        end_of_wait = time.monotonic() + 120
        while server.adapters and time.monotonic() < end_of_wait:
            time.sleep(0.02)
        assert not server.adapters
    for row in whole:
        assert row["optim/kl_sample_train_v2"] < 1e-8
        assert row["optim/importance_ratio_max"] == pytest.approx(1, abs=1e-3)

    with FakeVLLM(Transformers(stories_model), root=stories_model) as server:
        config = story_config(stories_model, tmp_path / "b", data, sampler=server.url, **settings)

        def end() -> None:  # in the second step, which has its own adapter
            if len({body["model"] for body in server.bodies}) == 2:
                raise ConnectionAbortedError

        server.before = end
        with pytest.raises(BackendError, match="did not answer /v1/completions"):
            asyncio.run(train.main(config))
        assert len(rows(tmp_path / "b")) == 1
        server.before = lambda: None
        again = run(config)
    assert [without_times(row) for row in again] == [without_times(row) for row in whole]
