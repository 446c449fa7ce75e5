"""True-thinking scores of the answers to MATH-500 or GSM8K.

    python -m recipes.true_thinking_score.analyze model_name=… n_problems=5
    python -m recipes.true_thinking_score.analyze dataset=gsm8k dataset_path=gsm8k/test.jsonl …

Writes a row for each problem and a summary to ``log_path``. Each step of an answer costs four
prompts that are only scored.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.recipes.math_rl.problems import Problem, problem_of, read_problems
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.recipes.true_thinking_score.tts import (
    DECORATIVE,
    HIGH,
    score_answer,
    share,
)
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

logger = logging.getLogger(__name__)

_HUB = {"math": ("HuggingFaceH4/MATH-500", None), "gsm8k": ("openai/gsm8k", "main")}


@chz.chz
class ScoreSettings(SamplingModelSettings):
    """Settings of the model and of its answers."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Base model, Hub name or local folder")
    max_tokens: int = number(4096, "Maximum tokens of an answer", low=1)
    concurrency: int = number(64, "Problems that are worked on concurrently", low=1)
    seed: int = chz.field(default=42, doc="Seed of the problems and of the perturbations")
    log_path: str | None = chz.field(
        default=None, doc="Folder of the results; default: /tmp/tinker-examples/tts-…"
    )


@chz.chz
class CLIConfig(ScoreSettings):
    """Settings of the program."""

    dataset: Literal["math", "gsm8k"] = chz.field(default="math", doc="math or gsm8k, of the Hub")
    dataset_path: str | None = chz.field(
        default=None, doc="A local copy, or problems of your own: a JSONL file or a folder"
    )
    n_problems: int = number(50, "Number of problems", low=1)


def load_problems(config: CLIConfig) -> list[Problem]:
    """Returns problems with their answers; the selection depends on the seed."""
    if config.dataset_path is not None:
        folder = Path(config.dataset_path).expanduser().is_dir()
        problems = read_problems(config.dataset_path, "test" if folder else "train")
    else:
        path, name = _HUB[config.dataset]
        rows = load_hf_dataset(path, "test", name, "Give a local copy: dataset_path=FILE.jsonl")
        problems = [problem_of(rows[i], f"{path}, row {i}") for i in range(len(rows))]
    random.Random(config.seed).shuffle(problems)
    return problems[: config.n_problems]


async def run(config: ScoreSettings, problems: Sequence[Problem], log_path: Path) -> dict[str, Any]:
    """Scores the answers to ``problems``; writes ``tts_per_problem.jsonl``, ``tts_summary.json``.

    A problem that fails, such as one that is too long for the model, has ``error`` in its row.
    """
    config.check()
    log_path.mkdir(parents=True, exist_ok=True)
    limit = asyncio.Semaphore(config.concurrency)
    with config.connect() as connection:
        model = await open_sampling_model(connection, config)

        async def row_of(i: int, problem: Problem) -> dict[str, Any]:
            async with limit:
                try:
                    found = await score_answer(
                        model.client,
                        model.renderer,
                        problem.question,
                        problem.answer,
                        config.max_tokens,
                        config.seed,
                    )
                except TinkerCookbookError as error:
                    logger.warning("problem %d: %s", i, error)
                    row = {"question": problem.question[:100], "answer": problem.answer}
                    return {**row, "error": str(error), "problem_idx": i}
            row = {**found.summary(), "problem_idx": i}
            print_line(
                f"{i + 1}/{len(problems)}: {row['n_steps']} steps, mean score "
                f"{row['mean_tts']:.3f}, {'right' if row['model_correct'] else 'wrong'}"
            )
            return row

        rows = await asyncio.gather(*(row_of(i, problem) for i, problem in enumerate(problems)))
    with open(log_path / "tts_per_problem.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    total = {"model": model.name, **summarize(rows)}
    (log_path / "tts_summary.json").write_text(json.dumps(total, indent=2) + "\n", "utf-8")
    for name, value in total.items():
        print_line(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")
    print_line(f"written to {log_path}")
    return total


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns counts and shares over all steps of the problems without an error."""
    good = [row for row in rows if "error" not in row]
    scores = [score for row in good for score in row["per_step_tts"]]
    checks = sum(row["n_self_verification"] for row in good)
    decorative = sum(row["n_sv_decorative"] for row in good)
    return {
        "n_problems": len(rows),
        "n_problems_succeeded": len(good),
        "n_problems_failed": len(rows) - len(good),
        "n_problems_correct": sum(row["model_correct"] for row in good),
        "accuracy": share([row["model_correct"] for row in good]),
        "n_steps_total": len(scores),
        "mean_steps_per_problem": len(scores) / max(len(good), 1),
        "mean_tts": share(scores),
        "frac_high_tts_0.7": share([score >= HIGH for score in scores]),
        "frac_high_tts_0.3": share([score >= 0.3 for score in scores]),
        "frac_decorative_0.005": share([score <= DECORATIVE for score in scores]),
        "n_self_verification": checks,
        "n_sv_decorative": decorative,
        "frac_sv_decorative": decorative / max(checks, 1),
    }


async def main(config: CLIConfig) -> None:
    """Scores the answers to a data set."""
    default = cli_utils.default_log_path(f"tts-{config.dataset}")
    await run(config, load_problems(config), Path(config.log_path or default).expanduser())


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
