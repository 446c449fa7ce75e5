"""Model cards for the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tinker_cookbook.engine.checkpoints.format import ADAPTER_CONFIG
from tinker_cookbook.weights._chat_files import GENERATION, TEMPLATE
from tinker_cookbook.weights.proof import LOADER, TEXT_MODEL, read_proof

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

_TOKENIZER_CONFIG = "tokenizer_config.json"
_VERSIONS_OF = ("tinker_cookbook", "transformers", "peft", "torch")


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
    versions = "\n".join(f"- {name} {_version(name)}" for name in _VERSIONS_OF)
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
