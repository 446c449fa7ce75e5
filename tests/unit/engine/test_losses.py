"""The loss table against hand-written numpy formulas, its defaults and its errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tinker_cookbook.engine.training.losses import LOSSES, LossInputs, get_loss
from tinker_cookbook.exceptions import ConfigurationError

RNG = np.random.default_rng(0)
N = 200
LP, Q = -RNG.exponential(2, N), -RNG.exponential(2, N)
A = RNG.normal(size=N)
R = np.exp(LP - Q)
SEQUENCE = np.repeat(np.arange(4), N // 4)
MASK = (RNG.random(N) < 0.8).astype(float)


def value(name: str, config=None, **extra) -> float:
    loss = get_loss(name)
    fields = {"logprobs": Q, "advantages": A, "weights": A, "sequence_ratio_mask": MASK, **extra}
    resolved = loss.resolve_config(config, per_token=frozenset(extra))
    inputs = LossInputs(
        {n: torch.from_numpy(v) for n, v in fields.items()},
        torch.from_numpy(SEQUENCE),
        4,
        resolved,
    )
    return loss.function(torch.from_numpy(LP), inputs).item()


def surrogate(ratio, low, high) -> float:
    return -np.minimum(ratio * A, np.clip(ratio, low, high) * A).sum()


def stable(coeff, low, high) -> float:
    return -(np.clip(R, low, high) * (LP * A - 0.5 * coeff * (LP - Q) ** 2)).sum()


def test_values_are_those_of_the_definitions():
    s = np.exp(
        [((LP - Q) * MASK)[i == SEQUENCE].sum() / MASK[i == SEQUENCE].sum() for i in range(4)]
    )
    low, high = RNG.uniform(0.3, 0.9, N), RNG.uniform(1.1, 3, N)
    clips = {"clip_low_threshold": low, "clip_high_threshold": high}
    narrow = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    expected = {
        value("cross_entropy"): -(LP * A).sum(),
        value("importance_sampling"): -(R * A).sum(),
        value("ppo"): surrogate(R, 0.8, 1.2),
        value("ppo", narrow): surrogate(R, 0.5, 1.5),
        value("ppo", **clips): surrogate(R, low, high),
        value("cispo"): -(np.clip(R, 0.0, 4.0) * LP * A).sum(),
        value("cispo", narrow): -(np.clip(R, 0.5, 1.5) * LP * A).sum(),
        value("dro", {"beta": 0.05}): -(LP * A - 0.5 * 0.05 * (LP - Q) ** 2).sum(),
        value("stable_reinforce"): stable(0.01, 0.0, 2.0),
        value("stable_reinforce", {"kl_coeff": 0.5, **narrow}): stable(0.5, 0.5, 1.5),
        value("gspo", narrow): surrogate(s[SEQUENCE], 0.5, 1.5),
        value("gspo", **clips): surrogate(s[SEQUENCE], low, high),
    }
    for found, wanted in expected.items():
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo", "cispo", "dro"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_one_recorded_logprob_of_minus_99_does_not_make_the_gradient_infinite(name, advantage):
    config = {
        "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "dro": {"beta": 0.05},
    }
    q = torch.tensor([-1.0, -99.0, -2.0])
    lp = torch.tensor([-1.1, -0.5, -1.9], requires_grad=True)
    # The sequences of gspo are single tokens here.
    fields = {
        "logprobs": q,
        "advantages": torch.full((3,), advantage),
        "sequence_ratio_mask": torch.ones(3),
    }
    loss = get_loss(name)
    inputs = LossInputs(fields, torch.arange(3), 3, loss.resolve_config(config.get(name)))
    value = loss.function(lp, inputs)
    value.backward()
    gradient = lp.grad
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert math.isfinite(value.item())
    if name in ("importance_sampling", "ppo", "gspo"):
        expected = [-advantage * math.exp(-0.1), 0.0, -advantage * math.exp(0.1)]
        assert gradient.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ppoo", None, r"loss_fn: got 'ppoo', expected one of .*did you mean 'ppo'\?"),
        ("stable_reinforce", {"kl_coef": 0.1}, r"stable_reinforce has no such setting.*'kl_coeff'"),
        ("custom", None, r"forward_backward_custom"),
        ("dro", None, r"loss_fn_config\['beta'\]: dro has no public default.*0\.05"),
        ("gspo", {"clip_low_threshold": 0.9}, r"clip_high_threshold.*gspo has no public default"),
        ("ppo", {"clip_low": 0.9}, r"'clip_low'\]: ppo has no such setting.*did you mean"),
        ("cross_entropy", {"beta": 1}, r"cross_entropy has no such setting, expected no settings"),
        ("dro", {"beta": math.nan}, r"got nan, expected a finite number"),
        ("dro", {"beta": math.inf}, r"got inf, expected a finite number"),
        ("dro", {"beta": "0.1"}, r"got '0.1', expected a finite number"),
        (
            "ppo",
            {"clip_low_threshold": 1.5},
            r"clip_low_threshold.*1\.5.*clip_high_threshold.*1\.2",
        ),
    ],
)
def test_invalid_settings_are_refused(name, config, message):
    with pytest.raises(ConfigurationError, match=message):
        get_loss(name).resolve_config(config)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [("dro", {"beta": 0.5}, -0.5), ("stable_reinforce", {"kl_coeff": 0.5}, -0.5 * math.exp(-1))],
)
def test_tokens_that_were_not_sampled_have_no_penalty(name, config, expected):
    """Prompt tokens have neither an advantage nor a sampler's log-probability."""
    lp = torch.tensor([-3.0, -2.0], requires_grad=True)
    fields = {"logprobs": torch.tensor([0.0, -1.0]), "advantages": torch.tensor([0.0, 0.0])}
    loss = get_loss(name)
    resolved = loss.resolve_config(config)
    inputs = LossInputs(fields, torch.zeros(2, dtype=torch.long), 1, resolved)
    (gradient,) = torch.autograd.grad(loss.function(lp, inputs), lp)
    assert gradient.tolist() == pytest.approx([0.0, expected])


def test_without_truncation_the_penalty_is_the_gradient_of_the_kl_divergence():
    """Exact expectation over a vocabulary of seven tokens, against autograd through the KL."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    q = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    lp = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((lp.exp() * (lp - q)).sum(), logits, retain_graph=True)
    config = get_loss("stable_reinforce").resolve_config(
        {"kl_coeff": 1.0, "clip_high_threshold": 1e9}
    )
    found = torch.zeros(7, dtype=torch.float64)
    for token in range(7):
        fields = {"logprobs": q[token : token + 1], "advantages": torch.zeros(1)}
        inputs = LossInputs(fields, torch.zeros(1, dtype=torch.long), 1, config)
        loss = LOSSES["stable_reinforce"].function(lp[token : token + 1], inputs)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += q[token].exp() * gradient
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
