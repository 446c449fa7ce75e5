"""What a sampling client says of datums: the log-probabilities of their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient


def whole_sequence(datum: tinker.Datum) -> tinker.ModelInput:
    """The T + 1 tokens of which a datum's T inputs and T targets were made."""
    last = int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])
    return datum.model_input.append_int(last)


async def score_datums(
    client: SamplingClient, data: Sequence[tinker.Datum]
) -> list[npt.NDArray[np.float64]]:
    """The client's log-probabilities [T] of each datum's targets, in nats.

    Those before the first target that is trained are not asked for, and 0: the backend has to read
    the prompt, but not to predict it. All are asked for before the first is awaited: the bundled
    engine computes together what waits together, and on a CPU no value depends on the company.
    """
    firsts = [_first_trained(datum) for datum in data]
    futures = [
        client.compute_logprobs(whole_sequence(datum), datum.model_input.length - first)
        for datum, first in zip(data, firsts, strict=True)
    ]
    scores = []
    for future, first in zip(futures, firsts, strict=True):
        values = np.array((await future)[1:], dtype=np.float64)
        values[:first] = 0.0
        scores.append(values)
    return scores


def _first_trained(datum: tinker.Datum) -> int:
    """Number of the first target that counts; the last one where none does."""
    for name in ("weights", "mask"):
        if name in datum.loss_fn_inputs:
            trained = datum.loss_fn_inputs[name].to_numpy() != 0
            return int(trained.argmax()) if trained.any() else len(trained) - 1
    return 0
