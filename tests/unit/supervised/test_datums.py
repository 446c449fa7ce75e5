"""Tokens and weights to datums, log-probabilities to losses, against definitions spelled out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.supervised.common import (
    compute_bpb,
    compute_mean_nll,
    compute_token_nll,
    count_loss_tokens,
    create_rightshifted_model_input_and_leftshifted_targets,
    data_from_examples,
    datum_from_model_input_weights,
    datum_from_tokens_weights,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

tokens_and_weights = st.lists(
    st.tuples(st.integers(0, 200_000), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=40
)


def targets(datum):
    return datum.loss_fn_inputs["target_tokens"].tolist()


def weights(datum):
    return datum.loss_fn_inputs["weights"].tolist()


@settings(deadline=None)
@given(tokens_and_weights, st.none() | st.integers(2, 50))
def test_each_token_is_predicted_from_those_before_it_with_its_own_weight(pairs, max_length):
    tokens, given_weights = [p[0] for p in pairs], [p[1] for p in pairs]
    datum = datum_from_tokens_weights(tokens, given_weights, max_length)
    kept = min(len(tokens), max_length or len(tokens))
    assert datum.model_input.length == len(targets(datum)) == len(weights(datum)) == kept - 1
    for i in range(kept - 1):
        assert datum.model_input.to_ints()[i] == tokens[i]
        assert targets(datum)[i] == tokens[i + 1]
        assert weights(datum)[i] == given_weights[i + 1]


@given(tokens_and_weights, st.none() | st.integers(2, 50))
def test_mean_reduction_keeps_the_mask_and_the_proportions(pairs, max_length):
    tokens, given_weights = [p[0] for p in pairs], [p[1] for p in pairs]
    plain = datum_from_tokens_weights(tokens, given_weights, max_length)
    mean = datum_from_tokens_weights(tokens, given_weights, max_length, reduction="mean")
    assert count_loss_tokens(mean) == count_loss_tokens(plain) == np.count_nonzero(weights(plain))
    if count_loss_tokens(plain):
        assert sum(weights(mean)) == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(
            weights(mean), np.array(weights(plain)) / np.sum(weights(plain)), rtol=1e-5
        )


def test_loss_tokens_are_counted_not_their_weights_summed():
    # The count of 208 trained tokens must not turn into the 2.0 to which their weights add up.
    data = [
        datum_from_tokens_weights(range(n + 11), [0.0] * 11 + [1.0] * n, reduction="mean")
        for n in (100, 108)
    ]
    assert sum(map(count_loss_tokens, data)) == 208
    assert sum(sum(weights(datum)) for datum in data) == pytest.approx(2.0)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, tuple])
def test_all_array_types_give_the_same_datum(make):
    datum = datum_from_tokens_weights(make([5, 6, 7]), make([0.0, 0.0, 1.0]))
    assert (datum.model_input.to_ints(), targets(datum), weights(datum)) == (
        [5, 6],
        [6, 7],
        [0.0, 1.0],
    )
    model_input = tinker.ModelInput(
        chunks=[tinker.EncodedTextChunk(tokens=[5, 6]), tinker.EncodedTextChunk(tokens=[7])]
    )
    same = datum_from_model_input_weights(model_input, make([0.0, 0.0, 1.0]))
    assert (same.model_input.to_ints(), targets(same)) == ([5, 6], [6, 7])
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert datum.loss_fn_inputs["weights"].dtype == "float32"


def test_a_datum_does_not_change_with_the_arrays_it_came_from():
    ids, values = np.arange(4), np.ones(4, dtype=np.float32)
    datum = datum_from_tokens_weights(ids, values)
    ids[:], values[:] = 9, 9
    assert (targets(datum), weights(datum)) == ([1, 2, 3], [1.0, 1.0, 1.0])


def test_pieces_of_one_conversation_weigh_one_together():
    pieces = [
        (tinker.ModelInput.from_ints([1, 2, 3]), [0, 0, 1]),
        (tinker.ModelInput.from_ints([1, 2, 3, 4, 5, 6]), [0, 0, 0, 1, 1, 1]),
    ]
    data = data_from_examples(pieces, reduction="mean")
    assert weights(data[0]) == [0, 0.25]
    assert weights(data[1]) == [0, 0, 0.25, 0.25, 0.25]
    assert weights(data_from_examples(pieces, max_length=4, reduction="mean")[1]) == [0, 0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([1, 2, 3], [1.0, 1.0]), r"weights: got shape \(2,\).*with shape \(3,\)"),
        (([1], [1.0]), "tokens: got 1, expected at least 2"),
        (([], []), "tokens: got 0, expected at least 2"),
        (([1, 2], [0.0, math.nan]), r"weights\[1\]: got nan, expected a finite number"),
        (([1, 2], [0.0, math.inf]), r"weights\[1\]: got inf"),
        (([1, 2], [0.0, 1.0], 1), "max_length: got 1, expected at least 2"),
        (([1, 2], [0.0, 1.0], None, "sum"), "reduction: got 'sum', expected 'none' or 'mean'"),
        (([1, 2, 3], [0.0, 1.0, -1.0], None, "mean"), "weights: their sum is 0, expected"),
    ],
)
def test_invalid_tokens_and_weights_are_refused(arguments, word):
    with pytest.raises(DataValidationError, match=word):
        datum_from_tokens_weights(*arguments)


def image(positions, data=b"x"):
    return tinker.types.ImageChunk(data=data, format="png", expected_tokens=positions)


def text(*tokens):
    return tinker.EncodedTextChunk(tokens=list(tokens))


def test_images_are_read_and_never_predicted():
    model_input = tinker.ModelInput(
        chunks=[text(1, 2), image(3), image(2, b"y"), text(5, 6, 7), image(4)]
    )
    values = [0.0] * 8 + [1.0, 1.0] + [0.0] * 4
    datum = datum_from_model_input_weights(model_input, values)
    assert [chunk.length for chunk in datum.model_input.chunks] == [2, 3, 2, 2]
    assert datum.model_input.chunks[2].data == b"y"
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 0, 0, 0, 0, 0, 5, 6, 7]
    assert weights(datum) == [0.0] * 7 + [1.0, 1.0]
    cut_in_text = datum_from_model_input_weights(model_input, values, max_length=9)
    assert [chunk.length for chunk in cut_in_text.model_input.chunks] == [2, 3, 2, 1]
    for cut_in_image in (3, 5, 6):
        datum = datum_from_model_input_weights(model_input, values, max_length=cut_in_image)
        assert datum.model_input.to_ints() == [1]
        assert datum.loss_fn_inputs["target_tokens"].tolist() == [2]
    shifted, targets = create_rightshifted_model_input_and_leftshifted_targets(model_input)
    assert [chunk.length for chunk in shifted.chunks] == [2, 3, 2, 2]
    assert targets == [2, 0, 0, 0, 0, 0, 5, 6, 7]


def test_mean_nll_is_weighted_over_all_tokens_at_once():
    logprobs = [torch.tensor([-1.0, -2.0]), np.array([-4.0]), [-8.0, -math.inf]]
    factors = [[1.0, 0.0], [0.5], tinker.TensorData(data=[2.0, 0.0], dtype="float32")]
    expected = (1 * 1 + 0.5 * 4 + 2 * 8) / 3.5
    assert compute_mean_nll(logprobs, factors) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(compute_mean_nll([[-1.0]], [[0.0]]))


def test_token_nll_counts_every_trained_token_once_under_any_reduction():
    logprobs = [[-1.0, -3.0], [-5.0, -7.0]]
    for reduction in ("none", "mean"):
        data = [
            datum_from_tokens_weights([1, 2, 3], [0, 0, 1], reduction=reduction),
            datum_from_tokens_weights([1, 2, 3], [0, 1, 1], reduction=reduction),
        ]
        assert compute_token_nll(logprobs, data) == pytest.approx((3 + 5 + 7) / 3)


def test_bits_per_byte_are_of_the_text_without_special_tokens(tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    text = "Grüße — 你好"
    ids = tokenizer.encode("Q:") + tokenizer.encode(text) + tokenizer.encode("<|im_end|>")
    prompt = len(tokenizer.encode("Q:"))
    datum = datum_from_tokens_weights(ids, [0.0] * prompt + [1.0] * (len(ids) - prompt))
    trained = len(ids) - prompt - 1  # without the end of the message, which is no text
    logprobs = np.full(len(ids) - 1, -math.log(2))  # one bit a token
    logprobs[: prompt - 1] = -99.0
    inputs = datum.loss_fn_inputs
    bpb = compute_bpb([logprobs], [inputs["weights"]], [inputs["target_tokens"]], tokenizer)
    assert bpb == pytest.approx(trained / len(text.encode("utf-8")))
