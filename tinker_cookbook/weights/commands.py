"""The commands ``export``, ``merge``, ``card`` and ``publish``."""

from __future__ import annotations

import time
from pathlib import Path

import chz

from tinker_cookbook.utils.terminal import get_console
from tinker_cookbook.weights._adapter import write_adapter
from tinker_cookbook.weights._export import check_strategy, write_merged
from tinker_cookbook.weights._merge import check_merge_dtype
from tinker_cookbook.weights._output import check_output, new_folder
from tinker_cookbook.weights.proof import Proof
from tinker_cookbook.weights.settings import ExportSettings

__all__ = ["ExportSettings", "MergeSettings", "export", "merge", "print_export"]


@chz.chz
class MergeSettings(ExportSettings):
    """Settings of ``merge``."""

    dtype: str = chz.field(
        default="bfloat16", doc="Of the written weights: bfloat16, float16 or float32"
    )
    merge_strategy: str = chz.field(
        default="auto", doc="shard (in blocks), full (loads the model), auto: shard where possible"
    )


def export(settings: ExportSettings) -> None:
    """Writes an adapter for PEFT and vLLM."""
    out, started = check_output(settings.out, settings.overwrite), time.monotonic()
    checkpoint = settings.open()
    with new_folder(out) as folder:
        proof = write_adapter(checkpoint, folder, verify=settings.verify, device=settings.device)
    print_export(out, proof, started)


def merge(settings: MergeSettings) -> None:
    """Writes a merged model."""
    check_merge_dtype(settings.dtype)
    check_strategy(settings.merge_strategy)
    out, started = check_output(settings.out, settings.overwrite), time.monotonic()
    checkpoint = settings.open()
    with new_folder(out) as folder:
        proof = write_merged(
            checkpoint,
            folder,
            dtype=settings.dtype,
            strategy=settings.merge_strategy,
            verify=settings.verify,
            device=settings.device,
        )
    print_export(out, proof, started)


def print_export(out: Path, proof: Proof, started: float) -> None:
    """Prints what was written, its facts and its proof."""
    console = get_console()

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for name, text in proof.facts.items():
        show(f"{name}: {text}")
    show(proof.table() if proof.comparisons else "not compared with the engine (verify=False)")
    files = sorted(path.name for path in out.iterdir())
    show(f"{out}: {', '.join(files)} ({time.monotonic() - started:.0f} s)")
