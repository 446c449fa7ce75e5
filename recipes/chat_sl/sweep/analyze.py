"""Tables and plots of the sweeps of several models, as Markdown.

    python -m recipes.chat_sl.sweep.analyze --local-dir FOLDER --output-dir results

FOLDER has a folder for each model, which has a log folder for each run, as
``recipes.chat_sl.sweep`` and ``launch_all`` write them. Without ``--local-dir`` the finished runs
of a W&B project are read.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.paths import ensure_writable_dir, write_atomically
from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.imports import missing_extra

DIVERGENCE_THRESHOLD = 2.0
"""Runs with a final ``test/nll`` above this value are omitted from the tables of best runs."""
_TIMES = ("time/step", "time/eval")


@dataclass
class RunResult:
    """The end of one run, and its held-out loss by step."""

    model: str
    rank: int
    lr: float
    test_nll: float
    train_nll: float
    wall_time_min: float
    run_name: str
    history: list[tuple[int, float]] = field(default_factory=list)
    test_bpb: float | None = None
    train_bpb: float | None = None


def fetch_runs(wandb_project: str, fetch_history: bool = True) -> list[RunResult]:
    """Returns the finished runs of a project of W&B; needs a key of W&B and its network."""
    import wandb

    results: list[RunResult] = []
    for run in wandb.Api().runs(wandb_project, filters={"state": "finished"}):
        rows = [dict(run.summary)]
        if fetch_history:
            rows = [*run.scan_history(keys=["step", "test/nll"]), *rows]
        found = _result(dict(run.config), rows, run.name)
        if found is not None:
            results.append(found)
    return results


def fetch_runs_local(sweep_root: str) -> list[RunResult]:
    """Returns the runs below ``SWEEP_ROOT/MODEL/RUN``; those without both losses are left out."""
    results: list[RunResult] = []
    for metrics in sorted(Path(sweep_root).expanduser().glob("*/*/metrics.jsonl")):
        config = json.loads(metrics.with_name("config.json").read_bytes())
        found = _result(config, read_rows(metrics), metrics.parent.name)
        if found is not None:
            results.append(found)
    return results


def _result(
    config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], name: str
) -> RunResult | None:
    last: dict[str, Any] = {}
    for row in rows:
        last.update({key: value for key, value in row.items() if value is not None})
    if "test/nll" not in last or "train_mean_nll" not in last:
        return None
    return RunResult(
        model=config["model_name"],
        rank=config["lora_rank"],
        lr=config["learning_rate"],
        test_nll=last["test/nll"],
        train_nll=last["train_mean_nll"],
        wall_time_min=sum(row.get(key) or 0 for row in rows for key in _TIMES) / 60,
        run_name=name,
        history=[
            (row["step"], row["test/nll"])
            for row in rows
            if row.get("step") is not None and row.get("test/nll") is not None
        ],
        test_bpb=last.get("test/bpb"),
        train_bpb=last.get("train_mean_bpb"),
    )


def group_by_model(runs: Iterable[RunResult]) -> dict[str, list[RunResult]]:
    """Returns the runs of each model, by rank and learning rate."""
    groups: dict[str, list[RunResult]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.model, run.rank, run.lr)):
        groups[run.model].append(run)
    return dict(groups)


def best_by_rank(runs: Iterable[RunResult]) -> dict[int, RunResult]:
    """Returns the run with the lowest held-out loss of each rank, without those that diverged."""
    best: dict[int, RunResult] = {}
    for run in sorted(runs, key=lambda run: (run.rank, run.test_nll)):
        # A NaN is never below the threshold.
        if run.test_nll < DIVERGENCE_THRESHOLD:
            best.setdefault(run.rank, run)
    return best


def generate_nll_plot(model_slug: str, runs: list[RunResult], output_dir: Path) -> str:
    """Plots the held-out loss by step, with a panel for each rank; returns the file's name."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise missing_extra("plots of sweeps", error, "plot") from error
    ranks = sorted({run.rank for run in runs})
    figure, axes = pyplot.subplots(1, len(ranks), figsize=(4 * len(ranks), 3.5), squeeze=False)
    for axis, rank in zip(axes[0], ranks, strict=True):
        for run in (run for run in runs if run.rank == rank and run.history):
            axis.plot(*zip(*run.history, strict=True), label=f"{run.lr:g}")
        axis.set(title=f"rank {rank}", xlabel="step", ylabel="test/nll")
        if axis.lines:
            axis.legend(title="learning rate", fontsize="small")
    figure.suptitle(model_slug)
    figure.tight_layout()
    name = f"{model_slug.replace('/', '-')}_nll_curves.png"
    figure.savefig(output_dir / name, dpi=120)
    pyplot.close(figure)
    return name


def generate_model_section(model_slug: str, runs: list[RunResult], plot_path: str | None) -> str:
    """Returns the Markdown of one model: its runs, and the best one of each rank in bold."""
    best = best_by_rank(runs)
    lines = [
        f"## {model_slug}",
        "",
        "| LR | LoRA Rank | Test NLL | Test BPB | Train NLL | Train BPB | Wall Time (min) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        mark = "**" if best.get(run.rank) is run else ""
        test, train = ("—" if v is None else f"{v:.4f}" for v in (run.test_bpb, run.train_bpb))
        lines.append(
            f"| {run.lr:g} | {run.rank} | {mark}{run.test_nll:.4f}{mark} | {test} "
            f"| {run.train_nll:.4f} | {train} | {run.wall_time_min:.1f} |"
        )
    if plot_path is not None:
        lines += ["", f"![{model_slug}]({plot_path})"]
    return "\n".join([*lines, ""])


def generate_sft_sweep_md(
    model_names: list[str],
    model_sections: list[str],
    by_model: dict[str, list[RunResult]] | None = None,
) -> str:
    """Returns the whole page: the best learning rate of each model and rank, then the sections."""
    lines = ["# SFT sweeps", "", "| model | rank | best learning rate | test/nll |"]
    lines.append("| --- | --- | --- | --- |")
    for name in model_names:
        for rank, run in best_by_rank((by_model or {}).get(name, ())).items():
            lines.append(f"| {name} | {rank} | {run.lr:g} | {run.test_nll:.4f} |")
    lines += ["", "Losses per token of models with different tokenizers cannot be compared.", ""]
    return "\n".join([*lines, *model_sections])


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and writes ``sft_sweep.md`` with its plots."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--wandb-project", default="lr-sweep-2026-03", help="project of W&B")
    parser.add_argument("--output-dir", default="results", help="folder of the page and the plots")
    parser.add_argument("--no-plots", action="store_true", help="tables only")
    parser.add_argument("--local-dir", help="folder with a folder for each model")
    given = parser.parse_args(argv)

    def program() -> None:
        if given.local_dir is not None:
            runs = fetch_runs_local(given.local_dir)
        else:
            runs = fetch_runs(given.wandb_project, fetch_history=not given.no_plots)
        if not runs:
            raise ConfigurationError(
                f"local-dir: got {given.local_dir}, expected a folder with finished runs in "
                "MODEL/RUN/metrics.jsonl"
            )
        folder, groups = ensure_writable_dir(given.output_dir, "output-dir"), group_by_model(runs)
        plots = {
            m: None if given.no_plots else generate_nll_plot(m, groups[m], folder) for m in groups
        }
        sections = [generate_model_section(m, groups[m], plots[m]) for m in groups]
        page = generate_sft_sweep_md(list(groups), sections, groups)
        write_atomically(folder / "sft_sweep.md", page.encode())
        print(f"{page}\n{folder / 'sft_sweep.md'}")

    run_program(program)


if __name__ == "__main__":
    main()
