"""Evaluates a model on datasets that Harbor has downloaded, selected by their short names."""

from __future__ import annotations

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.recipes.harbor_rl.eval import EvalConfig, TaskResult, run_eval
from tinker_cookbook.recipes.harbor_rl.harbor_env import load_harbor_tasks
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

DATASETS: dict[str, str] = {
    "terminal_bench": "terminal-bench-2.0/terminal-bench",
    "swe_bench": "swebench-verified-1.0/swebench-verified",
}


@chz.chz
class CLIConfig(EvalConfig):
    """Settings of the evaluation."""

    benchmarks: str = chz.field(
        default="terminal_bench", doc=f"One or more of {', '.join(DATASETS)}, comma-separated"
    )
    max_turns: int = 200
    max_tokens: int = 8192
    temperature: float = 0.1


def parse_benchmarks(benchmarks: str) -> list[str]:
    """Returns the names; raises ``ConfigurationError`` for an unknown one."""
    names = [name.strip() for name in benchmarks.split(",") if name.strip()]
    for name in names:
        if name not in DATASETS:
            raise ConfigurationError(
                f"benchmarks: got {name!r}, expected {' or '.join(DATASETS)}"
                f"{nearest_sentence(name, tuple(DATASETS))}"
            )
    return names


async def run_benchmark(cli_config: CLIConfig, benchmark: str) -> list[TaskResult]:
    """Evaluates on one dataset."""
    return await run_eval(cli_config, load_harbor_tasks(DATASETS[benchmark]))


async def main(cli_config: CLIConfig) -> None:
    """Evaluates on each dataset."""
    for benchmark in parse_benchmarks(cli_config.benchmarks):
        await run_benchmark(cli_config, benchmark)


if __name__ == "__main__":
    run_entrypoint(main)
