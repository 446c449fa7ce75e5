"""Pairs of datums on the small model, and an independent DPO in plain torch."""

from __future__ import annotations

import numpy as np
import torch

from tinker_cookbook.supervised.common import datum_from_tokens_weights


def make_pairs(count, seed=0, vocabulary=500, longest=20):
    """``count`` pairs as 2 * count datums: random prompts, answers of different lengths."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        prompt = rng.integers(3, vocabulary, size=rng.integers(3, longest))
        for _ in range(2):
            answer = rng.integers(3, vocabulary, size=rng.integers(2, longest))
            weights = np.r_[np.zeros(len(prompt)), np.ones(len(answer))]
            data.append(datum_from_tokens_weights(np.r_[prompt, answer], weights))
    return data


def plain_scores(model, data, mean=False):
    """Log-probability of each answer by a plain forward of each sequence, with autograd."""
    scores = []
    for datum in data:
        tokens = torch.tensor(datum.model_input.to_ints())
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
        mask = torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy()) != 0
        logprobs = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        picked = logprobs.gather(1, targets[:, None])[:, 0][mask]
        scores.append(picked.mean() if mean else picked.sum())
    return torch.stack(scores)


def plain_loss(name, scores, reference, beta, smoothing=0.0, gamma=0.5):
    """The loss of each pair, as its paper writes it."""
    chosen, rejected = scores[::2] - reference[::2], scores[1::2] - reference[1::2]
    if name == "ipo":
        return (chosen - rejected - 0.5 / beta) ** 2
    if name == "simpo":
        return torch.log1p(torch.exp(-(beta * scores[::2] - beta * scores[1::2] - gamma)))
    difference = (beta * (chosen - rejected)).double()
    right, wrong = (torch.log1p(torch.exp(sign * difference)) for sign in (-1, 1))
    return ((1 - smoothing) * right + smoothing * wrong).float()
