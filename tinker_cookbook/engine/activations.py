"""Estimates the memory of activations from a model's shape, without loading it."""

from __future__ import annotations


def activation_bytes_per_token(layers: int, hidden: int, inner: int, itemsize: int) -> int:
    """Returns the bytes that one trained token keeps for the backward pass.

    A layer keeps about ten tensors of the hidden width (norms, projections, attention) and five of
    the MLP's inner width.
    """
    return layers * (10 * hidden + 5 * inner) * itemsize
