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

    All are asked for before the first is awaited: the bundled engine computes together what waits
    together, and on a CPU no value depends on the company.
    """
    futures = [client.compute_logprobs(whole_sequence(datum)) for datum in data]
    return [np.array((await future)[1:], dtype=np.float64) for future in futures]
