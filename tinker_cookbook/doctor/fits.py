"""Computes which known models fit, with the engine's own memory estimates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinker_cookbook.model_shapes import ModelShape
from tinker_cookbook.model_table import shape_of

ROW_TOKENS = 2048
SEQUENCES = 16
RANK = 32
CPU_MICRO_BATCH_BYTES = 384 << 20
"""Activations of a micro-batch on a CPU (the engine's own constant)."""
LOGITS_BYTES = {"cpu": 32 << 20, "gpu": 512 << 20}
"""float32 logits of one chunk of the head; two such chunks exist at a time."""

MODELS = (
    *("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    *("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-3B"),
    *("Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"),
    *("Qwen/Qwen3-14B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B"),
    *("meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
)
"""Models that may fit, from small to large."""
SHAPES = {name: shape for name in MODELS if (shape := shape_of(name))}

ASSUMPTIONS = (
    f"LoRA of rank {RANK} on all layers that the engine covers, with gradients and both moments in "
    "float32",
    f"SFT: one row of {ROW_TOKENS} tokens; a longer row needs more",
    f"sampling: {SEQUENCES} sequences of {ROW_TOKENS} tokens in the KV cache",
    "RL: both at once, with one copy of the base model",
    "base_dtype=nf4: the memory of the host holds the model before it is quantised",
    "memory: currently free memory",
)


@dataclass(frozen=True)
class Needs:
    """Bytes that a model needs for each task; ``sft_recomputed`` uses activation
    checkpointing, which the engine enables automatically and which takes a third more time."""

    sft: int
    sft_recomputed: int
    rl: int
    sampling: int


@dataclass(frozen=True)
class Fit:
    """The largest known model that fits for one task; ``None``: not even the smallest fits."""

    work: str
    model: str | None
    needs_bytes: int


def needs_of(shape: ModelShape, itemsize: int, device_type: str, base_dtype: str = "auto") -> Needs:
    """Returns the bytes that a model needs on a device type."""
    weights, adapter = shape.weights_bytes(itemsize, base_dtype), shape.adapter_bytes(RANK)
    kv_cache = SEQUENCES * ROW_TOKENS * shape.kv_bytes_per_token(itemsize)
    on_cpu = device_type == "cpu"
    logits = 2 * LOGITS_BYTES["cpu" if on_cpu else "gpu"]
    whole = ROW_TOKENS * shape.activation_bytes_per_token(itemsize)
    recomputed = ROW_TOKENS * shape.activation_bytes_per_token(itemsize, recompute=True)
    # CPU micro-batches have a fixed size; rows above four times that size are checkpointed.
    if on_cpu and whole > 4 * CPU_MICRO_BATCH_BYTES:
        whole = max(CPU_MICRO_BATCH_BYTES, recomputed)
    training = weights + adapter + logits
    # The model is quantised when all of it has been read into the memory of the host.
    loading = shape.parameters * itemsize if on_cpu and base_dtype != "auto" else 0
    return Needs(
        sft=max(loading, training + whole),
        sft_recomputed=max(loading, training + recomputed),
        rl=max(loading, training + whole + kv_cache),
        sampling=max(loading, weights + adapter // 4 + kv_cache),
    )


def largest_fits(free_bytes: int, itemsize: int, device_type: str) -> list[Fit]:
    """Returns the largest known model for SFT, RL and sampling in ``free_bytes``."""

    def largest(work: str, bytes_of: Callable[[Needs], int], base_dtype: str = "auto") -> Fit:
        sizes = [
            (shape, bytes_of(needs_of(shape, itemsize, device_type, base_dtype)))
            for shape in SHAPES.values()
        ]
        fitting = [(shape, size) for shape, size in sizes if size <= free_bytes]
        if not fitting:
            return Fit(work, None, min(size for _, size in sizes))
        shape, size = max(fitting, key=lambda pair: pair[0].parameters)
        return Fit(work, shape.name, size)

    return [
        largest("SFT", lambda needs: needs.sft),
        largest("SFT with recomputation", lambda needs: needs.sft_recomputed),
        largest("RL", lambda needs: needs.rl),
        largest("sampling", lambda needs: needs.sampling),
        largest("SFT with base_dtype=nf4", lambda needs: needs.sft, "nf4"),
        largest("RL with base_dtype=nf4", lambda needs: needs.rl, "nf4"),
    ]
