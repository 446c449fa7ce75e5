"""Sections of a model card from the folder of a run: data, settings, curves, results."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.eval.benchmarks import load_result
from tinker_cookbook.eval.statistics import wilson_interval
from tinker_cookbook.exceptions import ConfigurationError, DataError, TinkerCookbookError
from tinker_cookbook.plot import PlotConfig, write_plot
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights._chat_format import stop_texts
from tinker_cookbook.weights._model_card import ModelCardConfig, generate_model_card

logger = logging.getLogger(__name__)

CARD = "README.md"
CURVES = "curves.png"
Sections = list[tuple[str, str]]

# Settings in the order of the card, if a run has them. No paths, keys or names of people.
_SETTINGS = (
    "recipe_name", "learning_rate", "lr_schedule", "warmup_steps", "num_epochs", "max_steps",
    "batch_size", "groups_per_batch", "group_size", "max_length", "max_tokens", "temperature",
    "loss_fn", "kl_penalty_coef", "dpo_beta", "lora_rank", "train_attn", "train_mlp",
    "train_unembed", "train_vision", "adam_beta1", "adam_beta2", "weight_decay",
    "grad_clip_norm", "seed",
)  # fmt: skip
_CURVES = (
    "train_mean_nll", "test/nll", "reward/total", "env/all/reward/total",
    "test/env/all/reward/total", "dpo_loss", "accuracy", "optim/kl_sample_train_v1",
)  # fmt: skip
_ROWS = 10
_COMMIT = re.compile(r"^# commit: (\w+)$", re.MULTILINE)
_CHANGES = re.compile(r"^(diff |# untracked: )", re.MULTILINE)
_EXAMPLE = "Why do cats purr?"


def write_card(
    folder: Path,
    config: ModelCardConfig,
    *,
    repo_id: str | None = None,
    checkpoint: str = "",
    log_path: str | None = None,
    evals: str | None = None,
    renderer_name: str | None = None,
    tokenizer_folder: Path | None = None,
) -> Path:
    """Writes ``README.md`` of an export, and ``curves.png`` if matplotlib is installed.

    Args:
        folder: Folder of the export.
        config: Metadata of the card.
        repo_id: Name of the repository.
        checkpoint: ``tinker://`` path.
        log_path: Folder of the run, for data, settings, curves and commit.
        evals: Output folder of ``tinker_cookbook.eval``, with ``NAME/result.json``.
        renderer_name: Chat format of the prompts.
        tokenizer_folder: Model folder, to render an example of a prompt.

    Raises:
        ConfigurationError: ``evals`` or ``log_path`` is not such a folder.
    """
    sections: Sections = []
    if log_path is not None:
        sections += run_sections(local_path(log_path), folder)
    if evals is not None:
        sections.append(("Evaluations", evaluation_table(local_path(evals, "evals"))))
    if renderer_name is not None and tokenizer_folder is not None:
        sections.append(("Prompt format", _prompt_format(renderer_name, tokenizer_folder)))
    if checkpoint.startswith("tinker://"):
        sections.append(("Checkpoint", f"`{checkpoint}`"))
    card = generate_model_card(
        config=config, repo_id=repo_id, model_path=str(folder), sections=sections
    )
    card.save(folder / CARD)
    return folder / CARD


def run_sections(log_path: Path, folder: Path) -> Sections:
    """Returns data, settings, curves and commit of a run; saves the plot of curves to
    ``folder``."""
    try:
        config = json.loads((log_path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"log_path: {log_path}/config.json cannot be read ({error}); expected the folder of a "
            "run, or leave log_path out"
        ) from error
    flat = _flat(config)
    sections: Sections = []
    data = {key: value for key, value in flat.items() if key.startswith("dataset_builder.")}
    if data:
        rows = [(key.removeprefix("dataset_builder."), value) for key, value in data.items()]
        sections.append(("Data", _table(("setting", "value"), rows)))
    shown = []
    for name in _SETTINGS:
        found = [v for k, v in flat.items() if k.rpartition(".")[2] == name]
        if found:
            shown.append((name, found[0]))
    if shown:
        sections.append(("Training", _table(("setting", "value"), shown)))
    rows = read_rows(log_path / "metrics.jsonl")
    names = [name for name in _CURVES if any(row.get(name) is not None for row in rows)]
    if names:
        text = _curve_table(rows, names)
        if drawn := _draw(log_path, names, folder):
            text = f"![curves]({drawn})\n\n{text}"
        sections.append(("Curves", text))
    if commit := _commit(log_path / "code.diff"):
        sections.append(("Code", commit))
    return sections


def evaluation_table(folder: Path) -> str:
    """Returns a table of the results below ``folder``: n, score, 95% interval.

    Raises:
        ConfigurationError: There are no results.
    """
    files = sorted(folder.glob("*/result.json")) or sorted(folder.glob("result.json"))
    if not files:
        raise ConfigurationError(
            f"evals: {folder} has no NAME/result.json, which tinker_cookbook.eval writes; is the "
            "folder right?"
        )
    rows = []
    for path in files:
        try:
            result = load_result(str(path.parent.parent), path.parent.name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: cannot be read as a result: {error!r}") from error
        if result is None:
            raise ConfigurationError(
                f"evals: {path} is the result of an earlier start, and the latest one has not "
                "finished; run its command again"
            )
        graded = result.num_examples - result.num_errors
        low, high = result.metrics.get("ci_low"), result.metrics.get("ci_high")
        if low is None or high is None:
            low, high = wilson_interval(result.num_correct, graded)
        interval = f"{low:.3f} to {high:.3f}"
        rows.append((result.name, graded, f"{result.score:.3f}", interval, result.num_errors))
    return _table(("benchmark", "n", "score", "95% interval", "errors"), rows)


def _prompt_format(renderer_name: str, folder: Path) -> str:
    text = f"Renderer `{renderer_name}`."
    try:
        tokenizer = get_tokenizer(str(folder))
        renderer = get_renderer(renderer_name, tokenizer)
        prompt = renderer.build_generation_prompt([{"role": "user", "content": _EXAMPLE}])
        shown = tokenizer.decode(prompt.to_ints())
        stops = ", ".join(f"`{text!r}`" for text in stop_texts(renderer, tokenizer))
    except TinkerCookbookError as error:  # for example a renderer of another package
        logger.warning("no example of a prompt in the card: %s", error)
        return text
    prompt_text = f"The prompt for the message {_EXAMPLE!r}:\n\n```\n{shown}\n```"
    return f"{text} {prompt_text}\n\nAn answer ends at {stops}."


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns plain values of nested settings by dotted name; shortens paths to the last part."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key.startswith("_") or value is None:
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            # Folders of this machine mean nothing to a reader.
            found[f"{prefix}{key}"] = Path(value).name if Path(value).is_absolute() else value
        elif isinstance(value, (int, float, bool)):
            found[f"{prefix}{key}"] = f"{value:.4g}" if isinstance(value, float) else value
    return found


def _curve_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    rows = [row for row in rows if any(row.get(name) is not None for name in names)]
    # The first, the last, and evenly spaced rows between; prefer rows that have the rarest metric.
    rare = [row for row in rows if row.get(names[-1]) is not None]
    chosen = rare if 2 <= len(rare) <= _ROWS else rows
    if len(chosen) > _ROWS:
        step = (len(chosen) - 1) / (_ROWS - 1)
        chosen = [chosen[round(i * step)] for i in range(_ROWS)]

    def shown(value: Any) -> str:
        return "" if value is None else f"{value:.4g}"

    lines = [(row.get("step", ""), *(shown(row.get(name)) for name in names)) for row in chosen]
    return _table(("step", *names), lines)


def _draw(log_path: Path, names: Sequence[str], folder: Path) -> str | None:
    try:
        write_plot(
            PlotConfig(log_path=str(log_path), metrics=",".join(names), output=str(folder / CURVES))
        )
    except ConfigurationError as error:  # matplotlib is not installed
        logger.info("the card has no picture: %s", error)
        return None
    return CURVES


def _commit(diff: Path) -> str | None:
    if not diff.is_file():
        return None
    text = diff.read_text(encoding="utf-8", errors="replace")
    commits = _COMMIT.findall(text)
    if not commits:
        return None
    changed = ", with uncommitted changes" if _CHANGES.search(text) else ""
    return f"Commit `{'`, `'.join(dict.fromkeys(commits))}`{changed}."


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
