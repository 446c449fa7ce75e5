"""A base model with a snapshot of an adapter, which is what requests are put to.

Drawing is the work of the ``batcher``, scoring given texts that of ``scoring``. Reported
log-probabilities are those of the model (temperature 1, whole vocabulary) from the same chunked
head that training uses, so they equal the trainer's for the same tokens.
"""

from __future__ import annotations

from tinker_cookbook.engine.adapters import Adapter
from tinker_cookbook.engine.base_model import BaseModel
from tinker_cookbook.engine.head import LoraPair
from tinker_cookbook.engine.low_rank import Terms


class Sampler:
    """Draws from ``base`` with an adapter, which never changes while the sampler lives."""

    def __init__(self, base: BaseModel, adapter: Adapter | None) -> None:
        self.base = base
        self._adapter = adapter
        self._terms: Terms | None = None

    def terms(self) -> Terms:
        """The adapter as layers apply it."""
        if self._terms is None:
            self._terms = {} if self._adapter is None else self._adapter.terms(self.base.dtype)
        return self._terms

    def unembed_pair(self) -> LoraPair | None:
        """The part of ``terms`` that belongs to the unembedding layer."""
        low_rank = self.terms().get(self.base.unembed_name)
        return None if low_rank is None else low_rank.by_column
