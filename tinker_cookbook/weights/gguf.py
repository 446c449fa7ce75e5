"""Exports checkpoints as GGUF, for llama.cpp and programs built on it, such as Ollama.

python -m tinker_cookbook.weights gguf tinker://RUN/sampler_weights/final out=model.gguf quant=q8_0
python -m tinker_cookbook.weights gguf tinker://RUN/… out=adapter.gguf lora=True base_out=base.gguf
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import chz
import torch

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.run.paths import local_path, write_atomically
from tinker_cookbook.utils.terminal import ProgressDisplay, get_console
from tinker_cookbook.weights._gguf_architectures import Architecture, require_gguf
from tinker_cookbook.weights._gguf_files import (
    FileReport,
    Watch,
    check_adapter_file,
    check_model_file,
    check_quant,
    write_adapter_file,
    write_model_file,
)
from tinker_cookbook.weights._merge import peak_memory_bytes
from tinker_cookbook.weights._modules import HEAD
from tinker_cookbook.weights._ollama import modelfile
from tinker_cookbook.weights._output import new_file, temporary_path
from tinker_cookbook.weights._source import RENDERER, Checkpoint
from tinker_cookbook.weights.proof import Proof, file_digest, prompt_tokens, reference_logprobs
from tinker_cookbook.weights.settings import CheckpointSettings

__all__ = ["GGUFSettings", "export_gguf", "write_gguf", "write_lora_gguf"]

_SUFFIX = ".gguf"
_LORA_QUANTS = ("f32", "f16")


@chz.chz
class GGUFSettings(CheckpointSettings):
    """Settings of ``gguf``."""

    out: str = chz.field(doc="File to write, named *.gguf")
    quant: str | None = chz.field(
        default=None,
        doc="f32, f16, bf16, q8_0 or q4_0; default: q8_0. With lora: f32 (default) or f16",
    )
    lora: bool = chz.field(
        default=False, doc="Write only the adapter, for use with a GGUF of the base model"
    )
    base_out: str | None = chz.field(
        default=None,
        doc="With lora: file for the base model with a head that the adapter can change",
    )
    base_quant: str = chz.field(default="f16", doc="Type of base_out: f32, f16, bf16, q8_0 or q4_0")
    drop_head: bool = chz.field(
        default=False, doc="With lora: omit the update of the head (the answers change)"
    )
    overwrite: bool = chz.field(
        default=False, doc="Replace an existing file once the new one is complete"
    )
    verify: bool = chz.field(
        default=True, doc="Load the file again and compare its log-probabilities"
    )
    device: str = chz.field(default="auto", doc="Device of the comparison: auto, cuda, mps or cpu")


def export_gguf(settings: GGUFSettings) -> None:
    """Writes a GGUF file, its proof and a Modelfile, and prints the proof."""
    started = time.monotonic()
    # Check all settings before a model is read.
    require_gguf()
    out = check_file("out", settings.out, settings.overwrite)
    base_out = None
    if settings.base_out is not None:
        base_out = check_file("base_out", settings.base_out, settings.overwrite)
    for name in ("base_out", "drop_head"):
        if getattr(settings, name) and not settings.lora:
            raise ConfigurationError(f"{name}: needs lora=True; leave it out")
    quant = check_quant(settings.quant or ("f32" if settings.lora else "q8_0"))
    base_quant = check_quant(settings.base_quant)
    checkpoint = settings.open()
    common: dict[str, Any] = {
        "quant": quant, "verify": settings.verify, "device": settings.device
    }  # fmt: skip
    with closing(_Progress()) as progress:
        if settings.lora:
            proof = write_lora_gguf(
                checkpoint,
                out,
                base_out=base_out,
                base_quant=base_quant,
                drop_head=settings.drop_head,
                watch=progress,
                **common,
            )
        else:
            proof = write_gguf(checkpoint, out, watch=progress, **common)
    written = [out, *([base_out] if base_out else []), _next_to(out, ".proof.json")]
    written += _write_modelfile(checkpoint, out, base_out, settings.lora)
    _print(proof, written, started)


def write_gguf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    quant: str = "q8_0",
    verify: bool = True,
    device: str = "auto",
    watch: Watch | None = None,
) -> Proof:
    """Writes a model with its adapter merged in float32, and ``NAME.proof.json`` next to it.

    Args:
        checkpoint: From ``open_checkpoint``.
        out: File to write; an existing one is replaced once the new one is complete.
        quant: ``f32``, ``f16``, ``bf16``, ``q8_0`` or ``q4_0``. Norms and biases stay in float32;
            with ``q4_0``, the head is in ``q8_0``.
        verify: Load the file again and compare its log-probabilities with the engine's.
        device: Device of the engine.
        watch: Called with a description of the work, the finished steps, and all steps.

    Raises:
        ConfigurationError: The package ``gguf`` is missing, or ``quant`` is unknown.
        WeightsError: llama.cpp lacks the architecture or the tokenizer, the disk is full, or the
            file disagrees with the engine; nothing is written.
    """
    require_gguf()
    quant, export = check_quant(quant), f"merged GGUF, {quant}"
    with new_file(out) as part:
        report = write_model_file(checkpoint, part, quant, watch=watch)
        proof = Proof.of(checkpoint)
        proof.facts |= _facts(report, part)
        if verify:
            from tinker_cookbook.weights import _gguf_proof as loaded

            tell = watch or _ignore
            proof.facts["weights"] = check_model_file(checkpoint, part, quant)
            tell("comparing with the engine, read back", 0, 1)
            reference = reference_logprobs(checkpoint, prompt_tokens(checkpoint), device)
            proof.add(loaded.compare_model_read_back(checkpoint, part, export, quant, reference))
            tell("comparing with the engine, read back", 1, 1)
            if loaded.llama_cpp_version() is None:
                proof.facts["llama.cpp"] = loaded.NO_LLAMA_CPP
            else:
                tell("comparing with the engine, in llama.cpp", 0, 1)
                proof.add(
                    loaded.compare_in_llama_cpp(checkpoint, part, None, export, quant, reference)
                )
                tell("comparing with the engine, in llama.cpp", 1, 1)
        _write_proof(proof, out, {out: part})
    return proof


def write_lora_gguf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    quant: str = "f32",
    base_out: Path | None = None,
    base_quant: str = "f16",
    drop_head: bool = False,
    verify: bool = True,
    device: str = "auto",
    watch: Watch | None = None,
) -> Proof:
    """Writes an adapter as a LoRA file of llama.cpp, and ``NAME.proof.json`` next to it.

    llama.cpp can change a head only if the base model's file has one. Usual files of models with a
    tied head do not; ``base_out`` writes a file that does.

    Args:
        checkpoint: From ``open_checkpoint``.
        out: File to write; an existing one is replaced once the new one is complete.
        quant: ``f32`` or ``f16``.
        base_out: File for the base model, or None.
        base_quant: Type of ``base_out``, like ``quant`` of ``write_gguf``.
        drop_head: Omit the update of the head.
        verify: Load the file again and compare its log-probabilities with the engine's.
        device: Device of the engine.
        watch: Called with a description of the work, the finished steps, and all steps.

    Raises:
        ConfigurationError: The package ``gguf`` is missing, a quant is unknown, or the adapter
            changes a head that the usual files of the base model lack.
        WeightsError: As for ``write_gguf``.
    """
    require_gguf()
    if quant not in _LORA_QUANTS:
        raise ConfigurationError(
            f"quant: got {quant!r}, expected one of {', '.join(_LORA_QUANTS)} with lora"
        )
    base_quant = check_quant(base_quant)
    tied = bool(Architecture.of(checkpoint.base_folder).config.tie_word_embeddings)
    has_head = HEAD in checkpoint.updates
    if has_head and tied and not drop_head and base_out is None:
        raise ConfigurationError(
            f"lora: the adapter changes the head of {checkpoint.base_model}, which shares its "
            "matrix with the embeddings: usual GGUF files of this model have no head that "
            "llama.cpp could change. Add base_out=base.gguf to write the base model with one, "
            "drop_head=True to omit that update (the answers change), or export the merged "
            "model without lora"
        )
    if drop_head:
        kept = {name: one for name, one in checkpoint.updates.items() if name != HEAD}
        if not kept:
            raise ConfigurationError("drop_head: the adapter changes only the head")
        checkpoint = replace(checkpoint, updates=kept)
    separate = has_head and tied and not drop_head
    with new_file(out) as part, _base_file(base_out, out, verify) as base:
        report = write_adapter_file(checkpoint, part, quant)
        proof = Proof.of(checkpoint)
        proof.facts |= _facts(report, part)
        if drop_head and has_head:
            proof.facts["head"] = (
                "left out (drop_head): compared with the engine without the update of the head"
            )
        if base is not None:
            # float32 is exact, so it is the default.
            base_quant = base_quant if base_out else "f32"
            write_model_file(
                checkpoint, base, base_quant, merge=False, separate_head=separate, watch=watch
            )
        if verify:
            proof.facts["weights"] = check_adapter_file(checkpoint, part, quant)
            if base is not None:
                proof.facts["weights of the base model"] = check_model_file(
                    checkpoint, base, base_quant, merge=False, separate_head=separate
                )
            quants = (quant, base_quant)
            _verify_adapter(checkpoint, part, base, quants, device, proof, watch or _ignore)
        _write_proof(proof, out, {out: part, **({base_out: base} if base_out and base else {})})
    return proof


def _verify_adapter(
    checkpoint: Checkpoint,
    part: Path,
    base: Path | None,
    quants: tuple[str, str],
    device: str,
    proof: Proof,
    watch: Watch,
) -> None:
    """Compares an adapter's file and its base model's file, of types ``quants``, with the
    engine."""
    from tinker_cookbook.weights import _gguf_proof as loaded

    (quant, base_quant), prompts = quants, prompt_tokens(checkpoint)
    export = f"LoRA GGUF, {quant}"
    watch("comparing with the engine, read back", 0, 1)
    reference = reference_logprobs(checkpoint, prompts, device)
    proof.add(loaded.compare_adapter_read_back(checkpoint, part, export, quant, reference, device))
    watch("comparing with the engine, read back", 1, 1)
    if loaded.llama_cpp_version() is not None:
        assert base is not None
        watch("comparing with the engine, in llama.cpp", 0, 1)
        export = f"{export}, on base {base_quant}"
        # The bound depends on the coarser of the two types.
        coarser = max(quants, key=lambda name: loaded.BOUNDS[name][0])
        proof.add(loaded.compare_in_llama_cpp(checkpoint, base, part, export, coarser, reference))
        watch("comparing with the engine, in llama.cpp", 1, 1)
        return
    proof.facts["llama.cpp"] = loaded.NO_LLAMA_CPP
    if base is not None:
        # The base model's reference: the engine with an adapter that changes nothing.
        unchanged = {
            name: replace(update, b=torch.zeros_like(update.b))
            for name, update in checkpoint.updates.items()
        }
        plain = reference_logprobs(replace(checkpoint, updates=unchanged), prompts, device)
        export = f"base model GGUF, {base_quant}"
        proof.add(loaded.compare_model_read_back(checkpoint, base, export, base_quant, plain))


def check_file(name: str, path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Returns the path of a new GGUF file; raises ``ConfigurationError`` if it cannot be one."""
    found = local_path(path, name).absolute()
    if found.suffix != _SUFFIX:
        raise ConfigurationError(
            f"{name}: got {path}, expected the name of a file that ends in {_SUFFIX}, such as "
            f"{found.name or 'model'}{_SUFFIX}"
        )
    if found.is_dir():
        raise ConfigurationError(f"{name}: {found} is a folder; give the name of a file")
    if found.exists() and not overwrite:
        raise ConfigurationError(
            f"{name}: {found} exists already; choose another name, or set overwrite=True to "
            "replace it once the new file is complete"
        )
    return found


@contextmanager
def _base_file(base_out: Path | None, out: Path, verify: bool) -> Iterator[Path | None]:
    """Yields the path for the base model: ``base_out``, a temporary file for the comparison, or
    None if it is not needed."""
    from tinker_cookbook.weights._gguf_proof import llama_cpp_version

    if base_out is not None:
        with new_file(base_out) as part:
            yield part
    elif verify and llama_cpp_version() is not None:
        temporary = temporary_path(out, "base")
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    else:
        yield None


def _facts(report: FileReport, part: Path) -> dict[str, str]:
    types = ", ".join(f"{count} {name}" for name, count in sorted(report.types.items()))
    facts = {"size": f"{part.stat().st_size / 2**20:.1f} MiB", "tensors": types}
    # Measured before the comparison, which loads the whole model.
    facts["peak memory of writing"] = f"{peak_memory_bytes() / 2**20:.0f} MiB"
    if report.merged:
        facts["changed tensors"] = str(report.merged)
    facts |= report.chat
    if report.untied:
        facts["head"] = (
            "stored as output.weight, apart from the embeddings, because the adapter changes the "
            "head alone"
        )
    return facts


def _next_to(out: Path, suffix: str) -> Path:
    return out.with_name(out.name.removesuffix(_SUFFIX) + suffix)


def _write_proof(proof: Proof, out: Path, written: dict[Path, Path]) -> None:
    """Writes the proof of ``out``; ``written`` has the temporary path of each file by its final
    one."""
    proof.files = {
        path.name: file_digest(part) for path, part in written.items() if path.parent == out.parent
    }
    write_atomically(_next_to(out, ".proof.json"), proof.encoded())


def _write_modelfile(
    checkpoint: Checkpoint, out: Path, base_out: Path | None, lora: bool
) -> list[Path]:
    """Writes a Modelfile, except for an adapter without a file of its base model."""
    if lora and base_out is None:
        return []
    name, _ = resolve_renderer_name(checkpoint.base_model, checkpoint.metadata.get(RENDERER))
    config = Architecture.of(checkpoint.base_folder).config
    model = base_out if lora and base_out else out
    text = modelfile(
        checkpoint.base_folder,
        name,
        os.path.relpath(model, out.parent),
        out.name if lora else None,
        int(config.max_position_embeddings),
    )
    path = _next_to(out, ".Modelfile")
    write_atomically(path, text.encode())
    return [path]


class _Progress:
    """Shows a progress bar for each part of the export."""

    def __init__(self) -> None:
        self._doing = ""
        self._display: ProgressDisplay | None = None

    def __call__(self, doing: str, done: int, total: int) -> None:
        if doing != self._doing:
            self.close()
            self._doing, self._display = doing, ProgressDisplay(total, description=doing)
            self._display.start()
        if self._display is not None:
            self._display.update(done, f"{done}/{total}")

    def close(self) -> None:
        """Stops the bar and leaves it visible."""
        if self._display is not None:
            self._display.stop()


def _ignore(doing: str, done: int, total: int) -> None:
    pass


def _print(proof: Proof, written: list[Path], started: float) -> None:
    console = get_console()

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for name, text in proof.facts.items():
        show(f"{name}: {text}")
    show(proof.table() if proof.comparisons else "not compared with the engine (verify=False)")
    show(f"wrote {', '.join(map(str, written))} ({time.monotonic() - started:.0f} s)")
