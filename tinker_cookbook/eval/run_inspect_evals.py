"""Evaluates a checkpoint or a base model with tasks of Inspect AI.

    python -m tinker_cookbook.eval.run_inspect_evals model_path=tinker://… tasks=my_task.py
    python -m tinker_cookbook.eval.run_inspect_evals model_name=… tasks=inspect_evals/ifeval

Needs ``pip install -e '.[inspect]'``. Tasks are files, ``file.py@task``, or names that a
package registers, separated by commas. The logs can be read with ``inspect view``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import chz
from rich.table import Table

from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.eval.inspect_bridge.evaluators import InspectEvaluatorBuilder, make_model
from tinker_cookbook.run.paths import ensure_writable_dir
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.training.config import BackendSettings
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console, is_terminal

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog


@chz.chz
class Config(InspectEvaluatorBuilder, BackendSettings, SamplerOptions):
    """Settings of the command: model and evaluation."""

    model_path: str | None = weights_field("sampler_weights", "Checkpoint; default: the base model")

    def check(self) -> None:
        """Raises ConfigurationError for an invalid setting; opens no connection."""
        super().check()
        self.model_settings().check()

    def model_settings(self) -> SamplingModelSettings:
        """Returns the settings of the model."""
        return SamplingModelSettings.of(
            self,
            model_path=self.model_path,
            model_name=self.model_name,
            renderer_name=self.renderer_name,
        )


async def main(config: Config) -> None:
    """Runs the tasks, and prints a table of the scores and the path of the logs."""
    evaluator = config()
    log_dir = ensure_writable_dir(evaluator.log_dir(), "log_dir")
    settings = config.model_settings()
    console = get_console()
    with settings.connect() as connection:
        model = await open_sampling_model(connection, settings)
        for line in (
            *connection.reasons,
            f"model: {model.name}",
            f"renderer: {model.renderer_name}, {model.renderer_reason}",
        ):
            console.print(line, markup=False, soft_wrap=True)
        inspect_model = make_model(
            config, model.client, model.model_name, model.renderer_name, model.model_path
        )
        try:
            await evaluator.run(inspect_model, display="rich" if is_terminal() else "plain")
        finally:
            # Also after Ctrl-C: the logs have the finished samples.
            if evaluator.last_logs:
                print_scores(evaluator.last_logs)
                where = f"logs: {log_dir}  (inspect view --log-dir {log_dir})"
                console.print(where, soft_wrap=True)


def print_scores(logs: Sequence[EvalLog]) -> None:
    """Prints a table with one row for each metric of each scorer."""
    table = Table("task", "scorer", "metric", "value", "samples", box=None)
    for log in logs:
        if log.results is None:
            continue
        done, total = log.results.completed_samples, log.results.total_samples
        for score in log.results.scores:
            scorer = f"{score.name} ({score.reducer})" if score.reducer else score.name
            for name, metric in score.metrics.items():
                count = str(done) if done == total else f"{done} of {total}"
                table.add_row(log.eval.task, scorer, name, f"{metric.value:.4f}", count)
    get_console().print(table)


if __name__ == "__main__":
    run_entrypoint(main)
