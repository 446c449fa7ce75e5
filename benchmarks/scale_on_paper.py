"""Estimates the cost of a token on 1 to 1,000 GPUs from assumed rates, each with its source.

    python -m benchmarks.scale_on_paper
    python -m benchmarks.scale_on_paper price=3.5 mfu=0.3 answers=4096

Nothing here was run on a GPU. Shapes, weights and operations are exact. Rates of the hardware are
from its datasheet. The share of these rates that is reached, and the prices, are assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import chz

from tinker_cookbook.doctor.fits import RANK
from tinker_cookbook.model_shapes import ModelShape
from tinker_cookbook.model_table import shape_of
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

MODELS = {"8B": "meta-llama/Llama-3.1-8B-Instruct", "70B": "meta-llama/Llama-3.3-70B-Instruct"}
COUNTS = (1, 8, 64, 256, 1000)
_BYTES = 2  # bfloat16
_GB = 1e9


@chz.chz
class Parts:
    """The assumptions of the calculation. The doc of each begins with its source."""

    peak: float = chz.field(default=989e12, doc="datasheet: bf16 FLOP/s of an H100 SXM")
    bandwidth: float = chz.field(default=3.35e12, doc="datasheet: bytes/s of its memory")
    memory: float = chz.field(default=80e9, doc="datasheet: bytes of its memory")
    link: float = chz.field(
        default=450e9, doc="datasheet: bytes/s between the GPUs of a node, one way"
    )
    network: float = chz.field(
        default=50e9, doc="datasheet: bytes/s of a GPU to other nodes, one way"
    )
    box: int = chz.field(default=8, doc="datasheet: GPUs in a node")
    mfu: float = chz.field(
        default=0.4,
        doc="assumed: share of the peak in training, MFU (measured on a CPU in bfloat16: 0.45)",
    )
    read: float = chz.field(
        default=0.6, doc="assumed: share of the memory bandwidth that decoding reaches"
    )
    full_rows: int = chz.field(
        default=4096,
        doc="assumed: tokens per GPU that fill a pass; a pass with fewer takes as long",
    )
    launch: float = chz.field(default=0.004, doc="assumed: minimum seconds of a decode step")
    call: float = chz.field(
        default=0.006, doc="measured: seconds that HTTP and the SDK add to a call (two CPU cores)"
    )
    usable: float = chz.field(default=0.9, doc="assumed: share of the memory that can be filled")
    price: float = chz.field(default=2.5, doc="assumed: dollars per GPU hour")
    answers: int = chz.field(default=2048, doc="assumed: answers per RL step")
    tokens: int = chz.field(default=2048, doc="assumed: tokens per answer")


@dataclass(frozen=True)
class Row:
    """One number of GPUs: seconds of an RL step's halves, bytes, and dollars of a million tokens.

    ``sft_rate`` is in tokens/s with as many tokens a step as the RL step has.
    """

    gpus: int
    replica: int
    bytes_per_gpu: float
    sft_rate: float
    sample_seconds: float
    train_seconds: float
    sft_dollars: float
    rl_dollars: float


def operations_per_token(shape: ModelShape, context: int) -> float:
    """Returns the operations of a trained token: LoRA forward and backward, and attention.

    A frozen weight costs 4 (forward, and the gradient of its input), an adapter weight 6.
    """
    adapter = RANK * sum(shape.lora_weights())
    # Causal attention: half of the context on average, two products, 3 times with the backward.
    attention = 6 * shape.layers * shape.heads * shape.head_dim * context
    return 4 * shape.active_weights + 6 * adapter + attention


def replica_of(shape: ModelShape, parts: Parts) -> int:
    """Returns the GPUs that hold one copy: the next power of two whose memory is enough."""
    kv_cache = 32 * parts.tokens * shape.kv_bytes_per_token(_BYTES)
    rows = parts.full_rows * shape.activation_bytes_per_token(_BYTES, recompute=True)
    needed = shape.weights_bytes(_BYTES) + shape.adapter_bytes(RANK) + kv_cache + rows
    return 2 ** max(0, math.ceil(math.log2(needed / (parts.usable * parts.memory))))


def train_seconds(shape: ModelShape, gpus: int, parts: Parts) -> float:
    """Returns the seconds of one optimizer step over all answers."""
    total = parts.answers * parts.tokens
    replica = replica_of(shape, parts)
    # Few tokens for each GPU do not fill it: a pass takes as long as with ``full_rows``.
    per_replica = max(total / (gpus // replica), parts.full_rows * replica)
    compute = per_replica * operations_per_token(shape, parts.tokens) / replica
    seconds = compute / (parts.peak * parts.mfu)
    if replica > 1:  # FSDP: each pass gathers all weights, forward and backward
        passes = math.ceil(per_replica / (parts.full_rows * replica))
        seconds += passes * 2 * shape.weights_bytes(_BYTES) / parts.link
    if gpus > replica:  # one sum of the adapter's fp32 gradients (ring: twice the bytes)
        speed = parts.link if gpus <= parts.box else parts.network
        seconds += 2 * shape.adapter_bytes(RANK) / 4 / speed
    return seconds + 2 * parts.call  # the pass and the step


def sample_seconds(shape: ModelShape, gpus: int, parts: Parts) -> float:
    """Returns the seconds until all answers are sampled: decode steps bound by memory reads."""
    replica = replica_of(shape, parts)
    rows = math.ceil(parts.answers / (gpus // replica))
    # What is left of the memory limits the rows that decode together; the others wait.
    weights = shape.weights_bytes(_BYTES)
    free = parts.usable * parts.memory * replica - weights
    row_bytes = parts.tokens * shape.kv_bytes_per_token(_BYTES)
    together = max(1, min(rows, int(free / row_bytes)))
    rounds = rows / together  # a row that ends makes room for the next one at once
    # A step reads the weights once, and the cache of each row: half of it on average.
    speed = parts.bandwidth * parts.read * replica
    step = (weights + together * row_bytes / 2) / speed
    compute = 2 * shape.active_weights * together / (parts.peak * parts.mfu * replica)
    return rounds * parts.tokens * max(step, compute, parts.launch)


def row_of(shape: ModelShape, gpus: int, parts: Parts) -> Row | None:
    """Returns the row of a number of GPUs; ``None`` if the model does not fit them."""
    replica = replica_of(shape, parts)
    if gpus < replica:
        return None
    total = parts.answers * parts.tokens
    train, sample = train_seconds(shape, gpus, parts), sample_seconds(shape, gpus, parts)
    dollars = gpus * parts.price / 3600 / (total / 1e6)
    held = shape.weights_bytes(_BYTES) / replica + shape.adapter_bytes(RANK)
    return Row(
        gpus,
        replica,
        held,
        total / train,
        sample,
        train,
        train * dollars,
        (train + sample) * dollars,
    )


def tables(parts: Parts) -> str:
    """Returns a table for each model, in Markdown."""
    lines: list[str] = []
    for size, name in MODELS.items():
        shape = shape_of(name)
        assert shape is not None, name
        lines += [
            f"**{size}** ({name}): weights {shape.weights_bytes(_BYTES) / _GB:.0f} GB, adapter of "
            f"rank {RANK} in training {shape.adapter_bytes(RANK) / _GB:.1f} GB",
            "",
            "| GPUs | GPUs per copy | GB of weights and adapter per GPU | SFT tok/s "
            "| SFT $ / M tokens | RL step: sampling | RL step: training | RL $ / M tokens |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for gpus in COUNTS:
            row = row_of(shape, gpus, parts)
            if row is None:
                lines.append(f"| {gpus} | {replica_of(shape, parts)} | does not fit | | | | | |")
                continue
            lines.append(
                f"| {gpus:,} | {row.replica} | {row.bytes_per_gpu / _GB:.0f} | "
                f"{row.sft_rate:,.0f} | {row.sft_dollars:.2f} | {row.sample_seconds:.0f} s | "
                f"{row.train_seconds:.1f} s | {row.rl_dollars:.2f} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def parts_table(parts: Parts) -> str:
    """Returns the assumptions with their values and sources, in Markdown."""
    lines = ["| assumption | value | source |", "|---|---|---|"]
    for name, field in chz.chz_fields(parts).items():
        source, _, what = (field._doc or "").partition(": ")
        lines.append(f"| {what} (`{name}`) | {getattr(parts, name):g} | {source} |")
    return "\n".join(lines)


def main(parts: Parts) -> None:
    """Prints the assumptions and the tables."""
    print(parts_table(parts), tables(parts), sep="\n\n")


if __name__ == "__main__":
    run_entrypoint(main)
