"""AdamW against torch's reference implementation."""

from __future__ import annotations

import math

import pytest
import torch

from tinker_cookbook.engine.training.optimizer import AdamSettings, AdamW
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, TrainingError


def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (4, 30), "b": (50, 4), "c": (7,)}
    return {
        n: (torch.randn(s, generator=generator) * 0.2).requires_grad_() for n, s in shapes.items()
    }


def gradients(step: int, size: float = 1.0) -> dict[str, torch.Tensor]:
    return {n: p.detach() * size for n, p in parameters(100 + step).items()}


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_equal_torch(clip, decay, record_property):
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(ours)
    reference = torch.optim.AdamW(theirs.values(), eps=1e-12, fused=False, foreach=False)
    worst = 0.0
    for step in range(6):
        rate = 1e-3 * (step + 1)  # hyper-parameters come with each step
        settings = AdamSettings(rate, 0.9, 0.95, 1e-12, decay, clip)
        metrics = optimizer.step(gradients(step), settings)
        for parameter, gradient in zip(theirs.values(), gradients(step).values(), strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip if clip else math.inf)
        reference.param_groups[0].update(lr=rate, betas=(0.9, 0.95), weight_decay=decay)
        reference.step()
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        worst = max(worst, *(float((ours[n] - theirs[n]).abs().max()) for n in ours))
    record_property("weights_max_abs", worst)
    assert worst <= 1e-7


def test_state_round_trip_is_bit_exact():
    straight, first = parameters(), parameters()
    one, two = AdamW(straight), AdamW(first)
    settings = AdamSettings(1e-3, weight_decay=0.01)
    assert one.state() == {}
    for step in range(3):
        one.step(gradients(step), settings)
        two.step(gradients(step), settings)
    saved = {name: value.clone() for name, value in two.state().items()}
    assert len(saved) == 9
    resumed = {n: p.detach().clone().requires_grad_() for n, p in first.items()}
    three = AdamW(resumed)
    three.load(saved, "checkpoint")
    for step in range(3, 6):
        one.step(gradients(step), settings)
        three.step(gradients(step), settings)
    assert all(torch.equal(straight[n], resumed[n]) for n in straight)
    assert all(torch.equal(value, three.state()[name]) for name, value in one.state().items())


def test_incomplete_state_is_refused():
    saved = AdamW(parameters())
    saved.step(gradients(0), AdamSettings())
    state = saved.state()
    del state["b.exp_avg_sq"]
    with pytest.raises(CheckpointError, match=r"tinker://x: optimizer state b.exp_avg_sq"):
        AdamW(parameters()).load(state, "tinker://x")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    weights = parameters()
    optimizer = AdamW(weights)
    optimizer.step(gradients(0), AdamSettings())
    before = {n: p.detach().clone() for n, p in weights.items()}
    moments = {n: v.clone() for n, v in optimizer.state().items()}
    broken = gradients(1)
    broken["b"][3, 2] = bad
    with pytest.raises(TrainingError, match=r"gradient norm is (nan|inf).*not changed"):
        optimizer.step(broken, AdamSettings())
    assert all(torch.equal(before[n], weights[n]) for n in weights)
    assert all(torch.equal(moments[n], v) for n, v in optimizer.state().items())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-4),
        ("learning_rate", math.nan),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", -1.0),
        ("weight_decay", math.inf),
        ("grad_clip_norm", -1.0),
    ],
)
def test_invalid_settings_are_refused(field, value):
    with pytest.raises(ConfigurationError, match=f"^{field}: got {value}"):
        AdamSettings(**{field: value})


def test_a_first_step_without_memory_can_be_taken_again(monkeypatch):
    ours, others = parameters(), parameters()
    optimizer, expected = AdamW(ours), AdamW(others)
    made, zeros_like = [], torch.zeros_like

    def scarce(*args, **kwargs):
        made.append(args)
        if len(made) == 4:  # the second tensor's second moment
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros_like(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", scarce)
        with pytest.raises(RuntimeError, match="allocate"):
            optimizer.step(gradients(0), AdamSettings(1e-2))
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    for one in (optimizer, expected):
        one.step(gradients(0), AdamSettings(1e-2))
    assert all(torch.equal(ours[name], others[name]) for name in ours)


@pytest.mark.parametrize(
    "settings",
    [
        AdamSettings(1e-3, eps=0.0),  # 0 / 0 where a gradient is 0, as for a fresh adapter's A
        AdamSettings(3e38, 0.9, 0.95, 1e-12, 1.0),
        AdamSettings(1e25, 0.0, 0.95, 1e-30, 1e20),
    ],
)
def test_a_step_that_would_write_nan_or_infinity_changes_nothing(settings):
    ours, theirs = parameters(), parameters()
    one, two = AdamW(ours), AdamW(theirs)
    usual = AdamSettings(1e-3)
    zero = {name: torch.zeros_like(value) for name, value in gradients(0).items()}
    for optimizer in (one, two):
        optimizer.step(zero, usual)
    with pytest.raises(TrainingError, match=r"would write a weight that is .* not changed"):
        one.step({**gradients(1), "c": zero["c"].clone()}, settings)
    for name in ours:
        assert torch.equal(ours[name], theirs[name])
    for optimizer in (one, two):  # moments and step count are as they were, too
        optimizer.step(gradients(2), usual)
    for name in ours:
        assert torch.equal(ours[name], theirs[name])
