"""Commands ``export``, ``merge``, ``card`` and ``publish``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook.engine.checkpoints.format import SCHEME
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, TinkerPath
from tinker_cookbook.engine.model.resolve import resolve_model
from tinker_cookbook.engine.sampler_settings import check_vllm_python
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, WeightsError
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.utils.terminal import get_console
from tinker_cookbook.weights._adapter import write_adapter
from tinker_cookbook.weights._export import check_strategy, write_merged
from tinker_cookbook.weights._merge import check_merge_dtype
from tinker_cookbook.weights._model_card import ModelCardConfig, write_card
from tinker_cookbook.weights._output import check_output, new_folder
from tinker_cookbook.weights._publish import publish_to_hf_hub
from tinker_cookbook.weights._vllm_proof import LORA_MODULE
from tinker_cookbook.weights.proof import Proof, print_proof, read_proof
from tinker_cookbook.weights.settings import ExportSettings

__all__ = [
    "CardSettings",
    "ExportSettings",
    "MergeSettings",
    "PublishSettings",
    "card",
    "export",
    "merge",
    "publish",
]

_LICENSE = re.compile(r"^license: *([\w.-]+) *$", re.MULTILINE)


@chz.chz
class MergeSettings(ExportSettings):
    """Settings of ``merge``."""

    dtype: str = chz.field(
        default="bfloat16", doc="Dtype of the written weights: bfloat16, float16 or float32"
    )
    merge_strategy: str = chz.field(
        default="auto", doc="shard (in blocks), full (loads the model), auto: shard where possible"
    )


@chz.chz
class CardSettings:
    """Settings of ``card``."""

    folder: str = chz.field(doc="Folder of an export; also without 'folder='")
    base_model: str | None = chz.field(
        default=None, doc="Hub name or folder of the base model; default: from the export"
    )
    log_path: str | None = chz.field(
        default=None, doc="Folder of the run; default: the one recorded in the checkpoint"
    )
    evals: str | None = chz.field(default=None, doc="Output folder of tinker_cookbook.eval")
    repo_id: str | None = chz.field(default=None, doc="Name of the repository, for the title")
    license: str | None = chz.field(default=None, doc="SPDX name; default: the base model's")
    datasets: str = chz.field(default="", doc="Hub names of the training data, comma-separated")
    language: str = chz.field(default="", doc="Language codes, comma-separated")
    tags: str = chz.field(default="", doc="Tags, comma-separated")


@chz.chz
class PublishSettings:
    """Settings of ``publish``."""

    folder: str = chz.field(doc="Folder of an export; also without 'folder='")
    repo_id: str = chz.field(doc="user/name on the Hugging Face Hub")
    private: bool = chz.field(default=True, doc="Whether a new repository is private")
    unverified: bool = chz.field(
        default=False, doc="Upload even if these files were not compared with the engine"
    )


def export(settings: ExportSettings) -> None:
    """Writes an adapter for PEFT and vLLM."""
    _write(settings, write_adapter)


def merge(settings: MergeSettings) -> None:
    """Writes a merged model."""
    check_merge_dtype(settings.dtype)
    check_strategy(settings.merge_strategy)
    _write(settings, partial(write_merged, dtype=settings.dtype, strategy=settings.merge_strategy))


def _write(settings: ExportSettings, write: Callable[..., Proof]) -> None:
    out, started = check_output(settings.out, settings.overwrite), time.monotonic()
    vllm_python = settings.vllm_python
    if vllm_python is not None:
        if not settings.verify:
            raise ConfigurationError("vllm_python: needs verify=True; leave one of the two out")
        vllm_python = check_vllm_python(vllm_python)
    checkpoint = settings.open(all_weights=isinstance(settings, MergeSettings))
    with new_folder(out) as folder:
        proof = write(
            checkpoint,
            folder,
            verify=settings.verify,
            device=settings.device,
            vllm_python=vllm_python,
        )
        write_card(
            folder,
            ModelCardConfig(
                base_model=checkpoint.base_model, license=_license_of(checkpoint.base_folder)
            ),
            checkpoint=checkpoint.name,
            log_path=_run_folder(checkpoint.name, checkpoint.metadata),
        )
    # The files may be moved, so their record has no path.
    proof.facts = {
        name: text.replace(LORA_MODULE, f"{out.name}={out}").replace("FOLDER", str(out))
        for name, text in proof.facts.items()
    }
    files = sorted(path.name for path in out.iterdir())
    print_proof(proof, f"{out}: {', '.join(files)}", started)


def card(settings: CardSettings) -> None:
    """Writes the card of an export again, with new information."""
    folder = local_path(settings.folder, "folder")
    proof = read_proof(folder)
    if proof is None:
        raise ConfigurationError(
            f"folder: {folder} has no proof.json or NAME.proof.json; expected a folder that "
            "`python -m tinker_cookbook.weights export`, merge or gguf wrote"
        )
    base_model = settings.base_model or proof.base_model
    path = write_card(
        folder,
        ModelCardConfig(
            base_model=base_model,
            datasets=_names(settings.datasets),
            tags=_names(settings.tags),
            license=settings.license
            or _license_of(resolve_model(base_model, need="tokenizer").folder),
            language=_names(settings.language),
        ),
        repo_id=settings.repo_id,
        checkpoint=proof.checkpoint,
        log_path=settings.log_path or _recorded_folder(proof.checkpoint),
        evals=settings.evals,
    )
    get_console().print(str(path), markup=False, highlight=False, soft_wrap=True)


def publish(settings: PublishSettings) -> None:
    """Uploads an export and prints its URL."""
    folder = local_path(settings.folder, "folder")
    proof = read_proof(folder) if folder.is_dir() else None
    if not settings.unverified and (proof is None or not proof.comparisons):
        raise WeightsError(
            f"{folder}: has no comparison with the engine in proof.json; export the checkpoint "
            "with verify=True, or set unverified=True"
        )
    url = publish_to_hf_hub(
        model_path=str(folder),
        repo_id=settings.repo_id,
        private=settings.private,
        unverified=settings.unverified,
    )
    get_console().print(url, markup=False, highlight=False, soft_wrap=True)


def _recorded_folder(path: str) -> str | None:
    if not path.startswith(SCHEME):
        return None
    try:
        run = CheckpointStore().get_run(TinkerPath.parse(path).run_id).info
    except CheckpointError:  # the run is on a server, or has been deleted
        return None
    return _run_folder(path, run.user_metadata)


def _run_folder(path: str, metadata: Mapping[str, str]) -> str | None:
    """Returns the folder of the run if it is on this machine."""
    log_path = metadata.get("log_path")
    if not log_path or not path.startswith(SCHEME):
        return None
    # Another run may have reused the folder.
    listed = Path(log_path) / "checkpoints.jsonl"
    run_id = TinkerPath.parse(path).run_id
    return log_path if listed.is_file() and run_id in listed.read_text("utf-8") else None


def _license_of(base_folder: Path) -> str | None:
    """Returns the licence in the card of the base model."""
    card = base_folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = _LICENSE.search(text.partition("\n---")[0])
    return found[1] if found else None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
