"""Model cards for the Hugging Face Hub, with data, settings, curves and results of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.engine.checkpoints.format import ADAPTER_CONFIG, SCHEME
from tinker_cookbook.eval.benchmarks import load_result
from tinker_cookbook.eval.statistics import wilson_interval
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.weights._chat_files import GENERATION, TEMPLATE
from tinker_cookbook.weights.proof import LOADER, TEXT_MODEL, read_proof

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

CARD = "README.md"
Sections = list[tuple[str, str]]

_TOKENIZER_CONFIG = "tokenizer_config.json"
_VERSIONS_OF = ("tinker_cookbook", "transformers", "peft", "torch")
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


@dataclass
class ModelCardConfig:
    """Metadata of a model card; empty fields are omitted."""

    base_model: str
    """Hub name of the base model."""
    datasets: list[str] = field(default_factory=list)
    """Hub names of the training data."""
    tags: list[str] = field(default_factory=list)
    """Added to ``tinker``, ``tinker-cookbook`` and, for an adapter, ``peft`` and ``lora``."""
    license: str | None = None
    """SPDX name, such as ``apache-2.0``."""
    language: list[str] = field(default_factory=list)
    """Codes such as ``en``."""


def generate_model_card(
    *,
    config: ModelCardConfig,
    repo_id: str | None = None,
    model_path: str | None = None,
    sections: Sequence[tuple[str, str]] = (),
) -> ModelCard:
    """Returns a model card; ``card.save("README.md")`` writes it.

    Args:
        config: Metadata.
        repo_id: Name of the repository, for title and example.
        model_path: Folder of the export; shows whether it is an adapter, and its comparison with
            the engine.
        sections: Additional sections: title and Markdown text.
    """
    from huggingface_hub import ModelCard, ModelCardData

    folder = None if model_path is None else Path(model_path)
    is_adapter = folder is not None and (folder / ADAPTER_CONFIG).is_file()
    gguf = sorted(folder.glob("*.gguf")) if folder is not None else []
    tags = [
        "tinker",
        "tinker-cookbook",
        *(("peft", "lora") if is_adapter else ()),
        *(("gguf",) if gguf else ()),
        *config.tags,
    ]
    proof = None if folder is None else read_proof(folder)
    loader = TEXT_MODEL if proof is None else proof.facts.get(LOADER, TEXT_MODEL)
    # Only a Hub name: a local folder means nothing to a reader.
    on_hub = _hub_name(config.base_model)
    data = ModelCardData(
        base_model=on_hub,
        library_name="peft" if is_adapter else "gguf" if gguf else "transformers",
        pipeline_tag="text-generation" if loader == TEXT_MODEL else "image-text-to-text",
        tags=list(dict.fromkeys(tags)),
        datasets=config.datasets or None,
        license=config.license,
        language=config.language or None,
    )
    base = (
        f"[{on_hub}](https://huggingface.co/{on_hub})" if on_hub else Path(config.base_model).name
    )
    kind = "LoRA adapter (PEFT)" if is_adapter else "model (transformers)"
    kind = f"GGUF ({', '.join(path.name for path in gguf)})" if gguf else kind
    parts = [
        f"# {repo_id or f'{Path(config.base_model).name}, fine-tuned'}",
        f"Fine-tuned from {base} with tinker_cookbook. Format: {kind}.",
        "## Use\n\n" + _example(on_hub or base, repo_id or "FOLDER", folder, gguf, loader),
        *(f"## {title}\n\n{text}" for title, text in sections),
    ]
    if proof is not None:
        facts = "\n".join(f"- {name}: {text}" for name, text in proof.facts.items())
        compared = (
            "Reloaded after writing, and compared with the engine in float32 on eight "
            f"prompts (absolute differences of log-probabilities, in nats):\n\n{proof.table()}"
            if proof.comparisons
            else "Not compared with the engine."
        )
        parts.append(f"## Comparison with the trained weights\n\n{compared}\n\n{facts}".rstrip())
    versions = "\n".join(f"- {name} {version(name)}" for name in _VERSIONS_OF)
    parts.append(f"## Versions\n\n{versions}")
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def _hub_name(base_model: str) -> str | None:
    is_folder = Path(base_model).expanduser().exists() or base_model.count("/") != 1
    return None if is_folder else base_model


def _example(
    base_model: str, name: str, folder: Path | None, gguf: Sequence[Path], loader: str
) -> str:
    if gguf:
        return f"```bash\nllama-server -m {gguf[0].name}\n```"
    is_adapter = folder is not None and (folder / ADAPTER_CONFIG).is_file()
    # Adapters have the tokenizer too, with the chat template of the run.
    tokenizer = name if folder is None or (folder / _TOKENIZER_CONFIG).is_file() else base_model
    lines = [f"from transformers import {loader}, AutoTokenizer", ""]
    if is_adapter:
        lines = ["from peft import PeftModel", *lines]
        lines += [
            f'base = {loader}.from_pretrained("{base_model}")',
            f'model = PeftModel.from_pretrained(base, "{name}")',
        ]
    else:
        lines.append(f'model = {loader}.from_pretrained("{name}")')
    lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")')
    if folder is not None and _has_template(folder):
        settings = ""
        if is_adapter and (folder / GENERATION).is_file():
            # PEFT uses the settings of the base model, which may stop elsewhere.
            lines[1] = lines[1].replace("AutoTokenizer", "AutoTokenizer, GenerationConfig")
            lines.append(f'settings = GenerationConfig.from_pretrained("{name}")')
            settings = "generation_config=settings, "
        lines += [
            'messages = [{"role": "user", "content": "Why do cats purr?"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
            f"answer = model.generate(**inputs, {settings}tokenizer=tokenizer, max_new_tokens=256)",
            'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :]))',
        ]
    return "\n".join(["```python", *lines, "```"])


def _has_template(folder: Path) -> bool:
    config = folder / _TOKENIZER_CONFIG
    in_config = config.is_file() and "chat_template" in json.loads(config.read_text("utf-8"))
    return in_config or (folder / TEMPLATE).is_file()


def write_card(
    folder: Path,
    config: ModelCardConfig,
    *,
    repo_id: str | None = None,
    checkpoint: str = "",
    log_path: str | None = None,
    evals: str | None = None,
) -> Path:
    """Writes ``README.md`` into the folder of an export.

    ``log_path`` is the folder of the run, for data, settings, curves and commit; ``evals`` the
    output folder of ``tinker_cookbook.eval``.

    Raises:
        ConfigurationError: ``evals`` or ``log_path`` is not such a folder.
    """
    sections: Sections = []
    if log_path is not None:
        sections += _run_sections(local_path(log_path))
    if evals is not None:
        sections.append(("Evaluations", _evaluation_table(local_path(evals, "evals"))))
    if checkpoint.startswith(SCHEME):
        sections.append(("Checkpoint", f"`{checkpoint}`"))
    card = generate_model_card(
        config=config, repo_id=repo_id, model_path=str(folder), sections=sections
    )
    card.save(folder / CARD)
    return folder / CARD


def _run_sections(log_path: Path) -> Sections:
    """Returns data, settings, curves and commit of a run."""
    try:
        flat = _flat(json.loads((log_path / "config.json").read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"log_path: {log_path}/config.json cannot be read ({error}); expected the folder of a "
            "run, or leave log_path out"
        ) from error
    prefix = "dataset_builder."
    last = {key.rpartition(".")[2]: value for key, value in reversed(flat.items())}
    data = [(k.removeprefix(prefix), v) for k, v in flat.items() if k.startswith(prefix)]
    settings = [(name, last[name]) for name in _SETTINGS if name in last]
    head = ("setting", "value")
    tables = [("Data", _table(head, data)), ("Training", _table(head, settings))]
    tables.append(("Curves", _curve_table(read_rows(log_path / "metrics.jsonl"))))
    return [
        *((title, table) for title, table in tables if table), *_commit(log_path / "code.diff")
    ]  # fmt: skip


def _evaluation_table(folder: Path) -> str:
    """Returns a table of the results below ``folder``: n, score, 95% interval."""
    rows = []
    for path in sorted(folder.glob("*/result.json")) or sorted(folder.glob("result.json")):
        result = load_result(str(path.parent.parent), path.parent.name)
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
    if not rows:
        raise ConfigurationError(
            f"evals: {folder} has no NAME/result.json, which tinker_cookbook.eval writes; is the "
            "folder right?"
        )
    return _table(("benchmark", "n", "score", "95% interval", "errors"), rows)


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


def _curve_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in _CURVES if any(row.get(name) is not None for row in rows)]
    if not names:
        return ""
    # The first, the last, and evenly spaced rows between; prefer rows that have the rarest metric.
    rows = [row for row in rows if any(row.get(name) is not None for name in names)]
    rare = [row for row in rows if row.get(names[-1]) is not None]
    chosen = rare if 2 <= len(rare) <= _ROWS else rows
    if len(chosen) > _ROWS:
        step = (len(chosen) - 1) / (_ROWS - 1)
        chosen = [chosen[round(i * step)] for i in range(_ROWS)]
    lines = [
        (row.get("step", ""), *("" if row.get(n) is None else f"{row[n]:.4g}" for n in names))
        for row in chosen
    ]
    return _table(("step", *names), lines)


def _commit(diff: Path) -> Sections:
    text = diff.read_text(encoding="utf-8", errors="replace") if diff.is_file() else ""
    commits = dict.fromkeys(_COMMIT.findall(text))
    changed = ", with uncommitted changes" if _CHANGES.search(text) else ""
    return [("Code", f"Commit `{'`, `'.join(commits)}`{changed}.")] if commits else []


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table; an empty text without rows."""
    lines = [head, ["---"] * len(head), *rows] if rows else []
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
