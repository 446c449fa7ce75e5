"""Compares exports in vLLM with the engine, and describes how vLLM loads an adapter."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tinker_cookbook.engine.model.resolve import model_config
from tinker_cookbook.engine.sampler_settings import (
    ARCHITECTURES_WITH_HEAD,
    CHECKED_VERSION,
    LORA_RANKS,
    lora_rank_limit,
)
from tinker_cookbook.engine.vision.images import IMAGE_IDS
from tinker_cookbook.exceptions import WeightsError
from tinker_cookbook.weights import _vllm
from tinker_cookbook.weights._modules import HEAD, of_vision_tower
from tinker_cookbook.weights._readers import run_reader
from tinker_cookbook.weights._source import Checkpoint
from tinker_cookbook.weights.proof import Comparison, PromptScores, compare

_ENV = {
    # In one process, which starts faster and raises the actual error.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_DEFAULT_RANK = 16
LORA_MODULE = "NAME=FOLDER"
"""Stands for the served name and the folder of an adapter in the command that loads it."""


def loading_in_vllm(checkpoint: Checkpoint) -> str:
    """Returns the command to load the adapter in vLLM, or why vLLM cannot load it."""
    architecture = next(iter(model_config(checkpoint.base_folder).get("architectures") or []), "")
    merge = "use `python -m tinker_cookbook.weights merge` instead"
    if any(update.experts for update in checkpoint.updates.values()):
        return f"not tested with adapters of routed experts in PEFT's layout: {merge}"
    if of_vision_tower(checkpoint.updates, checkpoint.base_folder):
        return (
            "vLLM ignores the updates of the vision tower, except with the experimental "
            f"--enable-tower-connector-lora, with which this package is not tested: {merge}"
        )
    if HEAD in checkpoint.updates and architecture not in ARCHITECTURES_WITH_HEAD:
        return (
            f"vLLM {CHECKED_VERSION} refuses this adapter, because it changes the head and "
            f"vLLM's {architecture or 'model'} has no adapters there: {merge}, or train with "
            "train_unembed=false"
        )
    rank = lora_rank_limit(checkpoint.rank)
    if rank is None:
        return f"vLLM supports ranks up to {LORA_RANKS[-1]}, not {checkpoint.rank}: {merge}"
    more = f" --max-lora-rank {rank}" if rank > _DEFAULT_RANK else ""
    base = shlex.quote(checkpoint.base_model)
    return f"vllm serve {base} --enable-lora{more} --lora-modules {LORA_MODULE}"


def compare_in_vllm(
    python: str,
    checkpoint: Checkpoint,
    model: Path,
    lora: Path | None,
    export: str,
    reference: Sequence[PromptScores],
    *,
    bound: float,
    measure: str = "largest",
) -> Comparison:
    """Compares vLLM's log-probabilities (in float32) with the engine's, on prompts of text.

    Raises:
        WeightsError: vLLM does not load the files.
    """
    reference = [scores for scores in reference if max(scores.tokens) < IMAGE_IDS]
    request = {
        "model": str(model),
        "lora": "" if lora is None else str(lora),
        "rank": lora_rank_limit(checkpoint.rank),
        "prompts": [scores.tokens for scores in reference],
    }
    try:
        answer = run_reader(
            _vllm.__file__,
            request,
            program=f"vLLM ({python})",
            error_lines=r"^[\w.]*(Error|Exception)\b",
            python=python,
            env=_ENV,
        )
    except WeightsError as error:
        if lora is None:
            raise
        raise WeightsError(f"{error}\n{loading_in_vllm(checkpoint)}") from error
    found = [np.array(row, dtype=np.float64) for row in answer["logprobs"]]
    reader = f"vLLM {answer['version']}"
    return compare(export, reader, reference, found, bound=bound, measure=measure)
