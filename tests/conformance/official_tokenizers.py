"""Tokenizers for the official tests: a Hub cache that is filled from local folders.

The tests load tokenizers by the names of the Hub. Where the Hub cannot be reached, folders with
tokenizers of the same families take their place. Families whose own vocabulary is not at hand use
a related one with their own chat template; tests of exact token ids fail there on both sides.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

# (start of the model's name, folder of the tokenizer, chat template if not the folder's own)
_2507 = "qwen3/chat_template.qwen3_instruct_2507.jinja"
_NEMOTRON = "templates_only/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja"
_FAMILIES = (
    ("Qwen/Qwen3.8", "qwen3", "templates_only/trl_qwen3_6.jinja"),
    ("Qwen/Qwen3.6", "qwen3", "templates_only/trl_qwen3_6.jinja"),
    ("Qwen/Qwen3.5", "qwen3", "templates_only/Qwen3.5-4B.jinja"),
    ("Qwen/Qwen3-VL", "qwen3", "qwen3/chat_template.qwen3_vl.jinja"),
    ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3", _2507),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3", _2507),
    ("Qwen/Qwen3-4B-Instruct-2507", "qwen3", _2507),
    ("Qwen/Qwen3", "qwen3", None),
    ("Qwen/Qwen2.5", "qwen2_5", None),
    ("meta-llama/Llama-3.2", "llama3", "llama3/chat_template.llama3_2.jinja"),
    ("meta-llama/Llama-3", "llama3", None),
    ("deepseek-ai/DeepSeek-V3.1", "deepseek_v3_1", None),
    ("deepseek-ai/DeepSeek-V3", "deepseek_v3", None),
    ("openai/gpt-oss", "gptoss", None),
    ("nvidia/NVIDIA-Nemotron-3", "qwen3", _NEMOTRON),
)
NAMES = [
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B-Base",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-Base",
    "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "Qwen/Qwen3-235B-A22B-Instruct-2507",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen/Qwen3-VL-235B-A22B-Instruct",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-9B-Base",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.5-35B-A3B-Base",
    "Qwen/Qwen3.5-397B-A17B",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.8-27B",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "deepseek-ai/DeepSeek-V3-0324",
    "deepseek-ai/DeepSeek-V3.1",
    "deepseek-ai/DeepSeek-V3.1-Base",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
]
# AutoTokenizer reads the model's type from its configuration before it reads the tokenizer.
_MODEL_TYPES = {
    "qwen3": "qwen3", "qwen2_5": "qwen2", "llama3": "llama", "deepseek_v3": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v3", "gptoss": "gpt_oss",
}  # fmt: skip
_COMMIT = "0" * 40
_SEES_IMAGES = ("Qwen/Qwen3.", "Qwen/Qwen3-VL")
_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def fill_hub_cache(tokenizers: Path, cache: Path) -> None:
    """Makes ``cache`` a Hub cache with a tokenizer for each of ``NAMES``."""
    for name in NAMES:
        family, template = next((f, t) for start, f, t in _FAMILIES if name.startswith(start))
        repository = cache / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / _COMMIT
        if snapshot.is_dir():
            continue
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(_COMMIT, "utf-8")
        snapshot.mkdir(parents=True)
        _link_files(_unpacked(tokenizers / family, cache / "unpacked" / family), snapshot)
        config = {"model_type": _MODEL_TYPES[family]}
        (snapshot / "config.json").write_text(json.dumps(config), "utf-8")
        if name.startswith(_SEES_IMAGES):
            (snapshot / "preprocessor_config.json").write_text(json.dumps(_IMAGES), "utf-8")
        if template is not None:
            (snapshot / "chat_template.jinja").unlink(missing_ok=True)
            shutil.copy(tokenizers / template, snapshot / "chat_template.jinja")


def _unpacked(folder: Path, target: Path) -> Path:
    if not target.is_dir():
        target.mkdir(parents=True)
        for source in folder.iterdir():
            if source.suffix == ".gz":
                with gzip.open(source, "rb") as packed, open(target / source.stem, "wb") as out:
                    shutil.copyfileobj(packed, out)
            elif source.suffix in (".json", ".jinja"):
                shutil.copy(source, target / source.name)
    return target


def _link_files(folder: Path, snapshot: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            (snapshot / name).symlink_to(folder / name)
