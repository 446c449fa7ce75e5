"""The parts of data parallel training that need no second process."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tinker_cookbook.engine.extensions.parallel import join, launch
from tinker_cookbook.engine.extensions.parallel.launch import ProcessRank
from tinker_cookbook.engine.extensions.parallel.share import (
    BatchLoss,
    GroupLoss,
    shares_of,
    stand_in,
)
from tinker_cookbook.engine.processes import Processes, factory
from tinker_cookbook.engine.training.packing import plan
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, TrainingError

CPU = torch.device("cpu")


def _sequences(lengths: list[int], prefix: int = 0) -> list[np.ndarray]:
    common = np.arange(prefix) + 1000
    rng = np.random.default_rng(0)
    return [np.concatenate([common, rng.integers(3, 900, n)]) for n in lengths]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [100, 10_000])
def test_every_datum_has_one_rank_and_the_work_is_even(ranks, budget):
    sequences = _sequences(np.random.default_rng(1).integers(10, 60, 40).tolist())
    shares = shares_of(plan(sequences, budget), sequences, ranks)
    assert sorted(i for share in shares for i in share) == list(range(40))
    assert all(share == sorted(share) for share in shares)
    work = [sum(len(sequences[i]) for i in share) for share in shares]
    assert max(work) - min(work) <= 60
    assert shares == shares_of(plan(sequences, budget), sequences, ranks)


def test_datums_with_a_common_prefix_stay_together_unless_they_are_most_of_the_batch():
    groups = [_sequences([9, 8, 7, 6], 50 + k) for k in range(4)]
    sequences = [one + 7 * k for k, group in enumerate(groups) for one in group]
    shares = shares_of(plan(sequences, 400, shared_budget=400), sequences, 2)
    members = [{i // 4 for i in share} for share in shares]
    assert [len(share) for share in shares] == [8, 8]
    assert members[0].isdisjoint(members[1])
    # One prompt with many answers: all ranks work.
    sequences = _sequences([30] * 8, 50)
    shares = shares_of(plan(sequences, 1000, shared_budget=1000), sequences, 2)
    assert [len(share) for share in shares] == [4, 4]


def _loss(indices, logprobs):
    scale = torch.tensor([float(i) for i in indices]).softmax(0)
    means = torch.stack([one.mean() for one in logprobs])
    return ((means * scale).sum() ** 2), {"count": float(len(indices))}


def test_a_loss_of_the_whole_batch_has_the_gradients_of_one_call():
    shares = [[0, 3], [1, 2, 4]]
    logprobs = [torch.randn(n, requires_grad=True) for n in (3, 5, 2, 4, 6)]
    expected = torch.autograd.grad(_loss(range(5), logprobs)[0], logprobs)
    loss = BatchLoss(_loss, shares, CPU)
    answers = []
    values = [logprobs[i].detach().numpy() for i in shares[1]]
    other = threading.Thread(target=lambda: answers.append(loss.answer(1, [0, 1, 2], values)))
    other.start()
    own = [logprobs[i] for i in shares[0]]
    value, metrics = loss.own([0, 1], own)
    other.join(5)
    assert value.item() == pytest.approx(_loss(range(5), logprobs)[0].item())
    assert (metrics, answers[0][:2]) == ({"count": 5.0}, (0.0, {}))
    far = [logprobs[i] for i in shares[1]]
    second, _ = stand_in(*answers[0], far)
    for i, found in zip(
        shares[0] + shares[1], torch.autograd.grad(value + second, own + far), strict=True
    ):
        torch.testing.assert_close(found, expected[i])


@pytest.mark.timeout(20)
def test_a_failure_ends_the_waiting_for_the_other_ranks():
    loss = BatchLoss(_loss, [[0], [1]], CPU)
    loss.give_up(TrainingError("rank 1 is out of memory"))
    with pytest.raises(TrainingError, match="rank 1 is out of memory"):
        loss.own([0], [torch.zeros(2, requires_grad=True)])
    with pytest.raises(TrainingError, match="another rank failed"):
        loss.answer(1, [0], [np.zeros(2, np.float32)])


def test_the_callers_error_in_a_loss_of_groups_is_kept():
    def broken(indices, logprobs):
        return None

    loss = GroupLoss(broken, [[0, 1], [2, 3]], CPU)
    with pytest.raises(DataValidationError):
        loss.answer(1, [0, 1], [np.zeros(2, np.float32)] * 2)
    assert isinstance(loss.error, DataValidationError)
    good = GroupLoss(_loss, [[0, 1], [2, 3]], CPU)
    value, _, gradients = good.answer(1, [0, 1], [np.ones(2, np.float32), np.ones(3, np.float32)])
    leaves = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    expected = _loss([2, 3], leaves)[0]
    assert value == pytest.approx(expected.item())
    for found, one in zip(gradients, torch.autograd.grad(expected, leaves), strict=True):
        np.testing.assert_allclose(found, one)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    process = ProcessRank(1, 2)
    assert process.device("cpu") == "cpu"
    with pytest.raises(
        ConfigurationError, match=r"device: got 'cuda:1' for 2 processes.*device=cuda"
    ):
        process.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert process.device("auto") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert process.device("auto") == process.device("cuda") == "cuda:1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"2 processes.*1 GPU\(s\).*--nproc-per-node 1"):
        process.device("auto")


@pytest.fixture
def fresh(monkeypatch):
    """As in a new process, with torchrun's variables."""
    monkeypatch.setattr(launch.processes, "this", None)
    given = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name in join._VARIABLES:
        monkeypatch.setenv(name, given.get(name, "1"))
    return monkeypatch


def test_one_process_of_torchrun_works_as_without_it(fresh):
    join.join()
    assert launch.processes.followers is None
    assert factory.make is Processes
    # Children of this process are no ranks.
    import os

    assert not set(join._VARIABLES) & set(os.environ)


def test_several_machines_are_refused(fresh):
    fresh.setenv("WORLD_SIZE", "16")
    fresh.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigurationError, match=r"16 processes on several machines.*backend=URL"):
        join.join()
