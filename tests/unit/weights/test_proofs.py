"""Every tampering with an export is found, however small the adapter (8 s)."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from exports import make_adapter
from gguf_models import make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tinker_cookbook.exceptions import WeightsError
from tinker_cookbook.weights import Checkpoint, _adapter, _export, _gguf_files, _merge
from tinker_cookbook.weights import gguf as gguf_command
from tinker_cookbook.weights._output import new_folder
from tinker_cookbook.weights._source import open_checkpoint

NORM = "model.layers.1.input_layernorm.weight"
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """A tied model, and an adapter whose updates are smaller than a step of 16 or 8 bits."""
    folder = tmp_path_factory.mktemp("proofs")
    base = make_model(folder / "base", "llama_tied")
    opened = open_checkpoint(str(make_adapter(folder / "adapter", base)), base_model=str(base))
    small = {name: replace(one, b=one.b * 1e-3) for name, one in opened.updates.items()}
    return replace(opened, updates=small)


def scaled(checkpoint: Checkpoint, factor: float, *modules: str) -> Checkpoint:
    chosen = modules or tuple(checkpoint.updates)
    return replace(
        checkpoint,
        updates={
            name: replace(one, b=one.b * factor) if name in chosen else one
            for name, one in checkpoint.updates.items()
        },
    )


def rewritten(change: Callable[[dict], None], checkpoint: Checkpoint) -> Checkpoint:
    """The same adapter on a copy of the base model in which ``change`` was made."""
    folder = checkpoint.base_folder.with_name("changed")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint.base_folder, folder)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return replace(checkpoint, base_folder=folder)


def times(name: str, factor: float, index: object = slice(None)) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        tensors[name][index] *= factor

    return change


def swap(tensors: dict) -> None:
    one, other = f"{Q}.weight", f"{K}.weight"
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


UPDATES: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "adapter omitted": lambda c: scaled(c, 0),
    "scale doubled": lambda c: scaled(c, 2),
    "scale of 0.9": lambda c: scaled(c, 0.9),
    "one module missing": lambda c: scaled(c, 0, Q),
    "sign of the head": lambda c: scaled(c, -1, "lm_head"),
    "updates of two layers swapped": lambda c: replace(
        c, updates={**c.updates, Q: c.updates[K], K: c.updates[Q]}
    ),
}
WEIGHTS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "one element of a norm": partial(rewritten, times(NORM, 1.5, 3)),
    "a norm": partial(rewritten, times(NORM, 1.05)),
    "the last norm": partial(rewritten, times("model.norm.weight", 1.02)),
    "a row of the embeddings": partial(rewritten, times("model.embed_tokens.weight", 0, 5)),
    "one weight": partial(rewritten, times(f"{K}.weight", -1, (2, 7))),
    "matrices swapped": partial(rewritten, swap),
}


def merged_files(dtype: str, written: Checkpoint, checkpoint: Checkpoint, out: Path) -> None:
    _merge.merge_files(written, out, dtype)
    # The files of the changed copy have other names.
    if written.base_folder != checkpoint.base_folder:
        checkpoint = rewritten(lambda _: None, checkpoint)
    _merge.check_merged_files(checkpoint, out, dtype)


def merged_loaded(dtype: str, written: Checkpoint, checkpoint: Checkpoint, out: Path) -> None:
    _export._merge_loaded(written, out, dtype)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    _export._check_weights(checkpoint, out, model, dtype, "full")


def gguf_file(quant: str, written: Checkpoint, checkpoint: Checkpoint, out: Path) -> None:
    _gguf_files.write_model_file(written, out / "m.gguf", quant)
    _gguf_files.check_model_file(checkpoint, out / "m.gguf", quant)


def gguf_base(quant: str, written: Checkpoint, checkpoint: Checkpoint, out: Path) -> None:
    path = out / "m.gguf"
    _gguf_files.write_model_file(written, path, quant, merge=False)
    _gguf_files.check_model_file(checkpoint, path, quant, merge=False)


def gguf_lora(quant: str, written: Checkpoint, checkpoint: Checkpoint, out: Path) -> None:
    _gguf_files.write_adapter_file(written, out / "m.gguf", quant)
    _gguf_files.check_adapter_file(checkpoint, out / "m.gguf", quant)


def peft_files(_: str, written: Checkpoint, checkpoint: Checkpoint, out: Path) -> None:
    _adapter.write_adapter(written, out, verify=False)
    _adapter._check_factors(checkpoint, out)


FORMATS = [
    *((merged_files, dtype, UPDATES | WEIGHTS) for dtype in ("float32", "bfloat16", "float16")),
    *((merged_loaded, dtype, UPDATES | WEIGHTS) for dtype in ("float32", "bfloat16")),
    *((gguf_file, quant, UPDATES | WEIGHTS) for quant in _gguf_files.QUANTS),
    *((gguf_base, quant, WEIGHTS) for quant in ("f16", "q8_0")),
    *((gguf_lora, quant, UPDATES) for quant in ("f32", "f16")),
    (peft_files, "", UPDATES),
]


@pytest.mark.parametrize(
    ("check", "kind", "tamperings"), FORMATS, ids=[f"{c.__name__}-{k}" for c, k, _ in FORMATS]
)
def test_every_tampering_is_found(check, kind, tamperings, checkpoint, tmp_path):
    check(kind, checkpoint, checkpoint, tmp_path)
    for tamper in tamperings.values():
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        written = tamper(checkpoint)
        with pytest.raises(WeightsError, match=r"than W \+ s B A|another update|alpha is"):
            check(kind, written, checkpoint, tmp_path)


def test_the_commands_make_these_checks(checkpoint, tmp_path, monkeypatch):
    """The writers get the checkpoint without its adapter."""

    def without(write):
        return lambda c, *args, **more: write(scaled(c, 0), *args, **more)

    monkeypatch.setattr(_export, "merge_files", without(_merge.merge_files))
    monkeypatch.setattr(_export, "_merge_loaded", without(_export._merge_loaded))
    write_model_file = without(gguf_command.write_model_file)
    monkeypatch.setattr(gguf_command, "write_model_file", write_model_file)
    for write in (
        lambda: _export.write_merged(checkpoint, tmp_path),
        lambda: _export.write_merged(checkpoint, tmp_path, strategy="full"),
        lambda: gguf_command.write_gguf(checkpoint, tmp_path / "m.gguf"),
    ):
        with pytest.raises(WeightsError, match=r"other (values )?than W \+ s B A"):
            write()


@contextmanager
def small_disk(size: int):
    """Files of this process cannot grow beyond ``size`` bytes; numpy then raises an error of its
    own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["gguf", "merge", "export"])
def test_a_full_disk_is_named(kind, checkpoint, tmp_path):
    out = tmp_path / "m.gguf"

    def write() -> None:
        if kind == "gguf":
            gguf_command.write_gguf(checkpoint, out, quant="f32", verify=False)
            return
        with new_folder(out) as folder:
            if kind == "merge":
                _merge.merge_files(checkpoint, folder, "float32")
            else:
                _adapter.write_adapter(checkpoint, folder, verify=False)

    with small_disk(20_000), pytest.raises(WeightsError, match=r"the disk is full .* has changed"):
        write()
    assert list(tmp_path.iterdir()) == []
