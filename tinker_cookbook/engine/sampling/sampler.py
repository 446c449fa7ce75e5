"""A base model with a snapshot of an adapter: the target of sampling requests.

``scheduler`` does the sampling and ``scoring`` scores given texts. Reported
log-probabilities are the model's (temperature 1, whole vocabulary) from the same chunked
head that training uses, so they equal the trainer's for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import Adapter
from tinker_cookbook.engine.model.low_rank import Segments, Terms
from tinker_cookbook.exceptions import TrainingError


class Sampler:
    """Samples from ``base`` with a fixed snapshot of an adapter.

    ``name`` identifies the weights in messages: a run or a checkpoint. The samplers of one
    ``owner`` share one fair share of the batch; without an owner each sampler has its own.
    """

    def __init__(
        self,
        base: BaseModel,
        adapter: Adapter | None,
        name: str | None = None,
        owner: str | None = None,
    ) -> None:
        self.base, self.owner = base, owner
        self.name = name or (base.name if adapter is None else f"an adapter of {base.name}")
        self._adapter = adapter
        self._terms: Terms | None = None

    def diverged(self, length: int) -> TrainingError:
        """Returns the error for non-finite numbers after ``length`` tokens."""
        return TrainingError(
            f"the weights of {self.name} give log-probabilities that are NaN or infinite (after "
            f"{length} tokens), so nothing can be sampled or scored with them: the run has "
            "diverged. Go back to an earlier checkpoint, and train on from it with a lower "
            "learning_rate or with grad_clip_norm"
        )

    @property
    def adapter(self) -> Adapter | None:
        """The snapshot; None samples from the base model."""
        return self._adapter

    def terms(self) -> Terms:
        """Returns the adapter's terms for the layers."""
        # A local variable, because another thread may release the terms at any time.
        terms = self._terms
        if terms is None:
            terms = {} if self._adapter is None else self._adapter.terms(self.base.dtype)
            self._terms = terms
        return terms

    def release_terms(self) -> None:
        """Frees the terms; the next call of ``terms`` computes equal ones. Thread-safe."""
        self._terms = None


def segments_of(owners: Sequence[Sampler]) -> Segments:
    """Returns the adapter segments of a batch; ``owners`` [T] is the sampler of each token."""
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    if len(numbers) == 1:  # one adapter for all tokens
        return Segments.of_one(owners[0].terms())
    terms = [owner.terms() for owner in numbers]
    whose = np.fromiter((numbers[owner] for owner in owners), np.int64, len(owners))
    bounds = [0, *(np.flatnonzero(np.diff(whose)) + 1).tolist(), len(whose)]
    return Segments([(terms[whose[start]], start, end) for start, end in pairwise(bounds)])
