"""Drawing tokens against a plain inversion in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinker_cookbook.engine.sampling import sample_tokens as module
from tinker_cookbook.engine.sampling.sample_tokens import (
    BatchSamplingParams,
    Exponentials,
    sample_tokens,
)

ALMOST_ONE = 1 - 2.0**-53


def plain(row: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    """One row, written as the definition reads."""
    if temperature == 0:
        return int(row.argmax())
    scaled = row.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    if top_k != -1:
        weights[weights < np.sort(weights)[-top_k]] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        shares = weights[order] / weights.sum()
        weights[order[np.cumsum(shares) - shares >= top_p]] = 0
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, min(uniform, 1 - 1e-15) * sums[-1], side="right"))


@pytest.mark.parametrize("vocabulary", [7, 256, 1000, 49152])
def test_equals_inverse_cdf_sampling(vocabulary):
    """Rows of every kind side by side, greedy ones among them."""
    rng = np.random.default_rng(vocabulary)
    count = 60
    logits = rng.normal(scale=3, size=(count, vocabulary)).astype(np.float32)
    temperature = rng.choice([0.0, 0.5, 1.0, 1.7], count)
    top_k = rng.choice([-1, 1, 5, vocabulary], count)
    top_p = rng.choice([1.0, 0.9, 0.3], count)
    uniform = rng.random(count)
    uniform[:4] = [0.0, ALMOST_ONE, 0.5, ALMOST_ONE]
    settings = (temperature, top_k, top_p, uniform)
    found = sample_tokens(torch.from_numpy(logits.copy()), BatchSamplingParams(*settings)).numpy()
    expected = [plain(logits[i], *(column[i] for column in settings)) for i in range(count)]
    # A float32 weight may move the border between two tokens past the number drawn: rarely.
    assert (found != expected).sum() <= (1 if vocabulary > 10_000 else 0)
    alone = [
        sample_tokens(
            torch.from_numpy(logits[i : i + 1].copy()),
            BatchSamplingParams(*(c[i : i + 1] for c in settings)),
        )
        for i in range(count)
    ]
    assert np.array_equal(torch.cat(alone).numpy(), found)


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
def test_zero_probability_is_never_sampled(uniform):
    logits = torch.full((3, 1000), -torch.inf)
    logits[0, 0], logits[1, 511], logits[2, 999] = 1.0, 1.0, 1.0
    ones, all_tokens = np.ones(3), np.full(3, -1)
    found = sample_tokens(logits, BatchSamplingParams(ones, all_tokens, ones, np.full(3, uniform)))
    assert found.tolist() == [0, 511, 999]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("vocabulary", [7, 1000, 49152])
def test_entropies_are_those_of_the_softmax(vocabulary, native, monkeypatch):
    if not native:
        monkeypatch.setattr(module, "library", lambda: None)
    logits = 3 * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[1], logits[2, 3], logits[3, 5:] = 0.0, 300.0, -torch.inf
    expected = torch.distributions.Categorical(logits=logits.double().clamp(min=-1e9)).entropy()
    found = Exponentials.of(logits, moments=True)
    assert found.entropies() == pytest.approx(expected.tolist(), abs=1e-6)
    # A row does not depend on the others, and what tokens are drawn from stays the same.
    assert Exponentials.of(logits[4:5], moments=True).entropies() == found.entropies()[4:5]
    plain = Exponentials.of(logits)
    assert plain.entropies() is None
    assert all(torch.equal(getattr(plain, x), getattr(found, x)) for x in ("weights", "sums"))
