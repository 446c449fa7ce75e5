"""Runs a recipe for each pair of learning rate and LoRA rank, with the official keys.

    python -m recipes.chat_sl.sweep recipe=sft base.model_name=… base.dataset=tulu3 \\
        'learning_rates=[1e-4, 3e-4, 1e-3]' 'lora_ranks=[32, 128]' sweep_dir=FOLDER

It uses ``python -m tinker_cookbook.sweep``, which sweeps any setting: all runs train on one server,
finished runs are skipped, and the same command continues an interrupted sweep.
"""

import enum
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.cli_utils import runs_path
from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.sweep.__main__ import main as sweep_main
from tinker_cookbook.sweep.results import best_of
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments, run_program
from tinker_cookbook.utils.terminal import print_line

RECIPES = {
    "sft": "tinker_cookbook.recipes.chat_sl.train",
    "math_rl": "tinker_cookbook.recipes.math_rl.train",
    "code_rl": "tinker_cookbook.recipes.code_rl.train",
    "rubric": "tinker_cookbook.recipes.rubric.train",
    "search_tool": "tinker_cookbook.recipes.search_tool.train",
    "dpo": "tinker_cookbook.recipes.preference.dpo.train",
    "shorter": "tinker_cookbook.recipes.preference.shorter.train",
    "distillation": "tinker_cookbook.recipes.prompt_distillation.train",
}
_DEFAULT_RECIPE = "sft"
ESCAPED = "\\,"
# The sweep command sets these for each run.
_SET_BY_SWEEP = ("log_path", "behavior_if_log_dir_exists", "max_steps", "backend")


def get_recipe(name: str) -> tuple[type[Any], Callable[[Any], Any]]:
    """Returns the ``CLIConfig`` and ``cli_main`` of a recipe, by its short name or its module.

    Raises:
        ConfigurationError: There is no such module, or it has no ``CLIConfig`` or ``cli_main``.
    """
    try:
        module = importlib.import_module(RECIPES.get(name, name))
        return module.CLIConfig, module.cli_main
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigurationError(
            f"recipe: Could not import recipe {name!r}: {error}{nearest_sentence(name, RECIPES)} "
            f"Expected one of {', '.join(RECIPES)}, or a module with CLIConfig and cli_main"
        ) from error


def sweep_config(recipe_config: type[Any]) -> type[Any]:
    """Returns the class of the command's settings; ``base.KEY`` are the keys of
    ``recipe_config``."""

    @chz.chz
    class SweepConfig:
        """Settings of a sweep; ``base.KEY`` are the keys of the recipe."""

        recipe: str = chz.field(
            default=_DEFAULT_RECIPE, doc=f"Module of the recipe, or one of {', '.join(RECIPES)}"
        )
        # A type that is known here only: annotations of this module are not texts.
        base: recipe_config = chz.field(  # pyright: ignore[reportInvalidTypeForm]
            default_factory=recipe_config, doc="Settings of all runs"
        )
        learning_rates: list[float] = chz.field(
            default_factory=lambda: [1e-5, 3e-5, 1e-4, 3e-4, 5e-4, 1e-3], doc="Learning rates"
        )
        lora_ranks: list[int] = chz.field(default_factory=lambda: [32, 128], doc="LoRA ranks")
        training_budget_examples: int = chz.field(
            default=100_000, doc="Examples of a run: max_steps is this divided by the batch size"
        )
        max_parallel: int = chz.field(default=1, doc="Concurrent runs")
        sweep_dir: str | None = chz.field(
            default=None, doc="Folder of the sweep; default: a new one"
        )
        skip_existing: bool = chz.field(
            default=False, doc="Has no effect: finished runs in sweep_dir are always left out"
        )
        metric: str | None = chz.field(
            default=None,
            doc="Metric to compare; default: train_mean_nll for sft, else the first of those of "
            "tinker_cookbook.sweep",
        )

    return SweepConfig


def run_sweep(config: Any, recipe_name: str) -> None:
    """Runs a sweep, prints the best run of each rank, and writes ``recommendations.json``.

    Raises:
        ConfigurationError: A setting cannot work; nothing was started.
        SystemExit: A run failed, or the sweep was interrupted.
    """
    folder = Path(config.sweep_dir or runs_path("sweeps", time.strftime("%Y%m%d_%H%M%S")))
    metric = config.metric or ("train_mean_nll" if recipe_name == _DEFAULT_RECIPE else None)
    words = [RECIPES.get(recipe_name, recipe_name), *_base_words(config)]
    words.append(f"learning_rate={','.join(map(str, config.learning_rates))}")
    words.append(f"lora_rank={','.join(map(str, config.lora_ranks))}")
    words += [f"log_dir={folder}", f"jobs={config.max_parallel}"]
    status = sweep_main([*words, *([] if metric is None else [f"metric={metric}"])])
    if (folder / "results.jsonl").is_file():
        _recommend(config, recipe_name, folder)
    if status:
        sys.exit(status)


def _base_words(config: Any) -> list[str]:
    """Returns ``key=value`` of the recipe's settings that differ from their defaults."""
    base = config.base
    size = getattr(base, "batch_size", None) or getattr(base, "groups_per_batch", None) or 128
    words = [f"max_steps={max(1, config.training_budget_examples // size)}"]
    defaults = type(base)()
    for name in chz.chz_fields(base):
        value = getattr(base, name)
        if name not in _SET_BY_SWEEP and value != getattr(defaults, name):
            value = value.value if isinstance(value, enum.Enum) else value
            key = "server" if name == "base_url" else name
            # A comma would separate two values.
            words.append(f"{key}={str(value).replace(',', ESCAPED)}")
    return words


def _recommend(config: Any, recipe_name: str, folder: Path) -> None:
    """Prints the best run of each rank, and writes them."""
    # A setting with one value is not among those that are swept.
    fixed = {"learning_rate": config.learning_rates[0], "lora_rank": config.lora_ranks[0]}
    rows = [{**fixed, **row} for row in read_rows(folder / "results.jsonl")]
    metric = rows[0]["metric"]
    best: dict[str, Any] = {}
    for rank in config.lora_ranks:
        row = best_of([row for row in rows if row["lora_rank"] == rank])
        if row is not None:
            rate, value = row["learning_rate"], row["value"]
            best[f"rank_{rank}"] = {"learning_rate": rate, "lora_rank": rank, metric: value}
            print_line(f"best for rank {rank}: learning_rate={rate:g} ({metric} {value:.5g})")
    content = {
        "recipe": recipe_name,
        "model_name": config.base.model_name,
        "metric": metric,
        "recommendations": best,
    }
    path = folder / "recommendations.json"
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    print_line(str(path))


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the sweep."""
    words = sys.argv[1:] if argv is None else list(argv)

    def program() -> None:
        # The recipe comes first, since its settings are part of the command's.
        given = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
        name = given[-1] if given else _DEFAULT_RECIPE
        run_sweep(parse_arguments(sweep_config(get_recipe(name)[0]), words), name)

    run_program(program)


if __name__ == "__main__":
    main()
