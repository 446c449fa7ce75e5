from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.training.lr_scheduling import compute_schedule_lr_multiplier


@pytest.mark.parametrize("total", [1, 7, 100])
def test_linear_without_warm_up_is_one_minus_the_fraction_done(total):
    for step in range(total):
        assert compute_schedule_lr_multiplier("linear", step, total) == 1 - step / total


@pytest.mark.parametrize(
    ("name", "reference"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_decay_equals_that_of_transformers(name, reference, warmup):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = reference(optimizer, warmup, 40)
    for step in range(40):
        if step >= warmup:  # transformers wastes the first update on a rate of 0
            ours = compute_schedule_lr_multiplier(name, step, 40, warmup)
            assert math.isclose(ours, scheduler.get_last_lr()[0], abs_tol=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_warm_up_rises_to_one_and_joins_the_decay(name):
    values = [compute_schedule_lr_multiplier(name, step, 20, 4) for step in range(20)]
    assert values[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(b <= a for a, b in itertools.pairwise(values[4:]))
    assert all(value > 0 for value in values)


def test_errors_say_what_to_do():
    with pytest.raises(ConfigurationError, match="did you mean 'cosine'"):
        compute_schedule_lr_multiplier("cosin", 0, 10)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="warmup_steps=11 must lie between 0 and the 10"):
        compute_schedule_lr_multiplier("linear", 0, 10, 11)
    with pytest.raises(ConfigurationError, match="total_steps >= 1"):
        compute_schedule_lr_multiplier("linear", 0, 0)
