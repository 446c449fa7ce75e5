"""Runs the SFT sweep for models of the hosted service: one ``recipes.chat_sl.sweep`` per model.

    python -m recipes.chat_sl.sweep.launch_all --dry-run
    python -m recipes.chat_sl.sweep.launch_all --tier small --models-parallel 2 --jobs-per-model 2
    python -m recipes.chat_sl.sweep.launch_all --only Qwen/Qwen3-8B

The models come from ``model_table``, in tiers by parameter count; larger models get smaller ranks.
Running the same command again resumes an interrupted sweep.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinker_cookbook.cli_utils import runs_path
from tinker_cookbook.model_info import get_model_attributes
from tinker_cookbook.model_table import LINEUP
from tinker_cookbook.utils.command_line.entrypoint import run_program

LR_ALL = [4e-05, 1e-4, 3e-4, 1e-3, 3e-3]
RANKS_LARGE = [1, 2, 4]
RANKS_MEDIUM = [1, 4, 16, 64]
RANKS_SMALL = RANKS_COMPACT = [4, 16, 64, 128]
WANDB_PROJECT = "lr-sweep-2026-03"
DATASET = "tulu3"
BATCH_SIZE = 128
TRAINING_BUDGET = 100_000
# Largest number of parameters of each tier, in billions.
_TIERS = {
    "compact": (3, RANKS_COMPACT),
    "small": (21, RANKS_SMALL),
    "medium": (120, RANKS_MEDIUM),
    "large": (float("inf"), RANKS_LARGE),
}


@dataclass
class ModelSweepConfig:
    """Settings of one model's sweep."""

    model_name: str
    tier: str
    learning_rates: list[float]
    lora_ranks: list[int]
    note: str = ""
    renderer_name: str | None = None


def _sweep_of(name: str, size: str) -> ModelSweepConfig:
    number, unit = re.findall(r"([\d.]+)([BT])", size)[0]
    billions = float(number) * (1000 if unit == "T" else 1)
    tier, (_, ranks) = next(item for item in _TIERS.items() if billions <= item[1][0])
    return ModelSweepConfig(name, tier, LR_ALL, ranks, note=size)


ALREADY_DONE: dict[str, ModelSweepConfig] = {}
NEW_MODELS: list[ModelSweepConfig] = [
    _sweep_of(name, get_model_attributes(name).size_str) for name in LINEUP
]


def build_sweep_command(
    cfg: ModelSweepConfig, jobs_per_model: int, skip_existing: bool = False
) -> list[str]:
    """Returns the command of one model's sweep; its folder depends only on the model."""
    return [
        *(sys.executable, "-m", "tinker_cookbook.recipes.chat_sl.sweep", "recipe=sft"),
        f"base.model_name={cfg.model_name}",
        f"base.dataset={DATASET}",
        f"base.batch_size={BATCH_SIZE}",
        f"base.wandb_project={WANDB_PROJECT}",
        *([] if cfg.renderer_name is None else [f"base.renderer_name={cfg.renderer_name}"]),
        "metric=test/nll",
        f"training_budget_examples={TRAINING_BUDGET}",
        f"max_parallel={jobs_per_model}",
        f"skip_existing={skip_existing}",
        f"sweep_dir={runs_path('sweeps', _file_name(cfg))}",
        f"learning_rates={cfg.learning_rates}",
        f"lora_ranks={cfg.lora_ranks}",
    ]


def _file_name(cfg: ModelSweepConfig) -> str:
    return cfg.model_name.replace("/", "-")


async def run_model_sweep(
    cfg: ModelSweepConfig,
    jobs_per_model: int,
    dry_run: bool,
    semaphore: asyncio.Semaphore,
    log_dir: str | None = None,
    skip_existing: bool = False,
) -> tuple[str, bool]:
    """Runs one model's sweep as a process; returns the model's name and whether all runs succeeded.

    The output is written to ``log_dir``, by default ``sweep-logs`` in the folder of runs.
    """
    command = build_sweep_command(cfg, jobs_per_model, skip_existing)
    if dry_run:
        print(f"{cfg.model_name} ({cfg.tier}):\n  {shlex.join(command)}")
        return cfg.model_name, True
    async with semaphore:
        log = Path(log_dir or runs_path("sweep-logs")) / f"{_file_name(cfg)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{cfg.model_name}: started, output in {log}", flush=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
            done = await process.wait() == 0
        print(f"{cfg.model_name}: {'done' if done else f'failed, see {log}'}", flush=True)
        return cfg.model_name, done


async def run_all(
    models: Sequence[ModelSweepConfig],
    models_parallel: int,
    jobs_per_model: int,
    dry_run: bool,
    skip_existing: bool = False,
) -> None:
    """Runs the sweeps of all models, ``models_parallel`` in parallel, and exits with 1 if one
    failed."""
    num_runs = sum(len(m.learning_rates) * len(m.lora_ranks) for m in models)
    print(f"{len(models)} models, {num_runs} runs, {models_parallel} models in parallel")
    semaphore = asyncio.Semaphore(models_parallel)
    done = await asyncio.gather(
        *(
            run_model_sweep(m, jobs_per_model, dry_run, semaphore, skip_existing=skip_existing)
            for m in models
        )
    )
    if not all(ok for _, ok in done):
        sys.exit(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the sweeps."""
    names = [m.model_name for m in NEW_MODELS]
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("--models-parallel", type=int, default=4, help="models in parallel")
    parser.add_argument("--jobs-per-model", type=int, default=3, help="parallel runs per model")
    parser.add_argument("--tier", choices=_TIERS, help="run only the models of this tier")
    parser.add_argument("--only", choices=names, metavar="MODEL", help="run only this model")
    parser.add_argument("--resume", action="store_true", help="has no effect: sweeps always resume")
    given = parser.parse_args(argv)
    models = [
        m for m in NEW_MODELS if given.tier in (None, m.tier) and given.only in (None, m.model_name)
    ]
    run_program(lambda: run_all(models, given.models_parallel, given.jobs_per_model, given.dry_run))


if __name__ == "__main__":
    main()
