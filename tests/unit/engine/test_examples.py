"""What is refused before any compute, and in which words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinker_cookbook.engine.training.examples import Example, check_examples
from tinker_cookbook.engine.training.losses import get_loss
from tinker_cookbook.exceptions import DataValidationError

F = np.float32


def supervised(**changes) -> Example:
    tokens = changes.pop("tokens", np.array([1, 2, 3]))
    inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, F), **changes}
    return Example(tokens, {k: v for k, v in inputs.items() if v is not None})


def rl(**changes) -> Example:
    inputs = {
        "target_tokens": np.array([2, 3, 4]),
        "logprobs": -np.ones(3, F),
        "advantages": np.ones(3, F),
        **changes,
    }
    return Example(np.array([1, 2, 3]), inputs)


GOOD = supervised()
BASE: Any = SimpleNamespace(vocab_size=9, context_length=10, check_images=lambda tokens: None)


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        ("cross_entropy", [GOOD, supervised(tokens=np.array([1, 9, 3]))],
         r"datum 1: model_input holds token id 9, expected 0 to 8"),
        ("cross_entropy", [supervised(tokens=np.array([-1, 2, 3]))], r"holds token id -1"),
        ("cross_entropy", [supervised(target_tokens=np.array([2, 3, 10]))],
         r"datum 0: target_tokens holds token id 10"),
        ("cross_entropy", [supervised(tokens=np.array([], int))], r"model_input is empty"),
        ("cross_entropy", [supervised(tokens=np.array([1.0, 2.0, 3.0]))],
         r"model_input has type float64, expected integers"),
        ("cross_entropy", [supervised(target_tokens=np.array([2.5, 3, 4]))],
         r"target_tokens has type float64, expected integers"),
        ("cross_entropy", [supervised(weights=np.ones(2, F))],
         r"weights has shape \(2,\), expected \(3,\) to match model_input's 3 tokens"),
        ("cross_entropy", [supervised(weights=np.array(1.0))], r"weights has shape \(\)"),
        ("cross_entropy", [supervised(target_tokens=np.array([2, 3]), weights=np.ones(2, F))],
         r"target_tokens has shape \(2,\), expected \(3,\)"),
        ("cross_entropy", [supervised(target_tokens=np.ones((3, 2), int))],
         r"weights has shape \(3,\), expected \(3, 2\)"),
        ("cross_entropy", [GOOD, supervised(weights=np.array([1, np.nan, 1], F))],
         r"datum 1: weights is nan at position 1"),
        ("cross_entropy", [supervised(weights=np.array([1, 1, np.inf], F))],
         r"weights is inf at position 2"),
        ("cross_entropy", [supervised(tokens=np.ones(12, int))],
         r"model_input has 12 tokens, but the model's context is 10"),
        ("cross_entropy", [supervised(weights=None)],
         r"loss_fn_inputs lacks 'weights'; cross_entropy needs target_tokens, weights"),
        ("cross_entropy", [supervised(weight=np.ones(3, F))],
         r"has 'weight', which cross_entropy does not use.*did you mean 'weights'"),
        ("importance_sampling", [GOOD], r"lacks 'logprobs'"),
        ("importance_sampling", [rl(advantages=np.array([0, 0, np.nan], F))],
         r"advantages is nan at position 2"),
        ("importance_sampling", [rl(target_tokens=np.ones((3, 2), int))],
         r"target_tokens has shape \(3, 2\), expected \(3,\)"),
        ("ppo", [rl(clip_low_threshold=np.ones(3, F)), rl()],
         r"datum 1: optional loss_fn_inputs differ from those of datum 0"),
        ("ppo", [], r"got no datum"),
    ],
)  # fmt: skip
def test_invalid_data_is_refused(loss, data, message):
    with pytest.raises(DataValidationError, match=message):
        check_examples(data, get_loss(loss), BASE)


def test_good_data_passes():
    wide = supervised(target_tokens=np.ones((3, 2), int), weights=np.ones((3, 2), F))
    assert check_examples([GOOD], get_loss("cross_entropy"), BASE) == frozenset()
    assert check_examples([wide], get_loss("cross_entropy"), BASE) == frozenset()
    clipped = [rl(clip_low_threshold=np.ones(3, F))]
    assert check_examples(clipped, get_loss("ppo"), BASE) == {"clip_low_threshold"}


def test_fields_of_other_losses_and_a_mask_are_ignored():
    """A datum with the fields of several losses, as the hosted service takes it."""
    everything = {**rl().inputs, **supervised().inputs, "mask": np.ones(3, F)}
    everything["target_tokens"] = rl().inputs["target_tokens"]
    example = Example(rl().tokens, everything)
    for name in ("cross_entropy", "importance_sampling"):
        loss = get_loss(name)
        kept = example.for_loss(loss)
        assert set(kept.inputs) == set(loss.required)
        check_examples([kept], loss, BASE)
    unknown = Example(example.tokens, {**everything, "advantage": np.ones(3, F)})
    with pytest.raises(DataValidationError, match="did you mean 'advantages'"):
        check_examples([unknown.for_loss(loss)], loss, BASE)
    assert GOOD.for_loss(get_loss("cross_entropy")) is GOOD
