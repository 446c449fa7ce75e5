"""Exports checkpoints as GGUF, for llama.cpp and programs built on it, such as Ollama.

python -m tinker_cookbook.weights gguf tinker://RUN/sampler_weights/final out=model.gguf quant=q8_0
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.run.paths import local_path, write_atomically
from tinker_cookbook.weights._gguf_architectures import Architecture, require_gguf
from tinker_cookbook.weights._gguf_files import (
    check_adapter_file,
    check_model_file,
    check_quant,
    write_adapter_file,
    write_model_file,
)
from tinker_cookbook.weights._gguf_proof import (
    compare_adapter_read_back,
    compare_in_llama_cpp,
    compare_model_read_back,
    has_llama_cpp,
)
from tinker_cookbook.weights._merge import peak_memory_bytes
from tinker_cookbook.weights._modules import HEAD
from tinker_cookbook.weights._ollama import modelfile
from tinker_cookbook.weights._output import new_file, temporary_path
from tinker_cookbook.weights._source import RENDERER, Checkpoint
from tinker_cookbook.weights.proof import (
    Proof,
    file_digest,
    print_proof,
    prompt_tokens,
    reference_logprobs,
)
from tinker_cookbook.weights.settings import OutputSettings

__all__ = ["GGUFSettings", "export_gguf", "write_gguf", "write_lora_gguf"]

_SUFFIX = ".gguf"
_LORA_QUANTS = ("f32", "f16")


@chz.chz
class GGUFSettings(OutputSettings):
    """Settings of ``gguf``."""

    out: str = chz.field(doc="File to write, named *.gguf")
    quant: str | None = chz.field(
        default=None,
        doc="f32, f16, bf16, q8_0 or q4_0; default: q8_0. With lora: f32 (default) or f16",
    )
    lora: bool = chz.field(
        default=False, doc="Write only the adapter, for use with a GGUF of the base model"
    )


def export_gguf(settings: GGUFSettings) -> None:
    """Writes a GGUF file, its proof and a Modelfile, and prints the proof."""
    started = time.monotonic()
    # Check all settings before a model is read.
    require_gguf()
    out = _check_file(settings.out, settings.overwrite)
    quant = check_quant(settings.quant or ("f32" if settings.lora else "q8_0"))
    checkpoint = settings.open()
    write = write_lora_gguf if settings.lora else write_gguf
    proof = write(checkpoint, out, quant=quant, verify=settings.verify, device=settings.device)
    written = [out, _next_to(out, ".proof.json")]
    if not settings.lora:
        written.append(_write_modelfile(checkpoint, out))
    print_proof(proof, f"wrote {', '.join(map(str, written))}", started)


def write_gguf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    quant: str = "q8_0",
    verify: bool = True,
    device: str = "auto",
) -> Proof:
    """Writes a model with its adapter merged in float32, and ``NAME.proof.json`` next to it.

    Args:
        checkpoint: From ``open_checkpoint``.
        out: File to write; an existing one is replaced once the new one is complete.
        quant: ``f32``, ``f16``, ``bf16``, ``q8_0`` or ``q4_0``. Norms and biases stay in float32;
            with ``q4_0``, the head is in ``q8_0``.
        verify: Load the file again and compare its log-probabilities with the engine's.
        device: Device of the engine.

    Raises:
        ConfigurationError: The package ``gguf`` is missing, or ``quant`` is unknown.
        WeightsError: llama.cpp lacks the architecture or the tokenizer, the disk is full, or the
            file disagrees with the engine; nothing is written.
    """
    require_gguf()
    quant, export = check_quant(quant), f"merged GGUF, {quant}"
    proof = Proof.of(checkpoint)
    with new_file(out) as part:
        proof.facts |= _facts(write_model_file(checkpoint, part, quant), part)
        if verify:
            proof.facts["weights"] = check_model_file(checkpoint, part, quant)
            reference = reference_logprobs(checkpoint, prompt_tokens(checkpoint), device)
            proof.add(compare_model_read_back(checkpoint, part, export, quant, reference))
            if has_llama_cpp(proof):
                proof.add(compare_in_llama_cpp(checkpoint, part, None, export, quant, reference))
        _write_proof(proof, out, part)
    return proof


def write_lora_gguf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    quant: str = "f32",
    verify: bool = True,
    device: str = "auto",
) -> Proof:
    """Writes an adapter as a LoRA file of llama.cpp, and ``NAME.proof.json`` next to it.

    Parameters and errors are those of ``write_gguf``, except for ``quant``: ``f32`` or ``f16``.

    Raises:
        ConfigurationError: The adapter changes a head that files of the base model lack.
    """
    require_gguf()
    if quant not in _LORA_QUANTS:
        raise ConfigurationError(
            f"quant: got {quant!r}, expected one of {', '.join(_LORA_QUANTS)} with lora"
        )
    tied = bool(Architecture.of(checkpoint.base_folder).config.tie_word_embeddings)
    if HEAD in checkpoint.updates and tied:
        raise ConfigurationError(
            f"lora: the adapter changes the head of {checkpoint.base_model}, which shares its "
            "matrix with the embeddings: GGUF files of this model have no head that llama.cpp "
            "could change. Export the merged model without lora, or train with "
            "train_unembed=false"
        )
    export, proof = f"LoRA GGUF, {quant}", Proof.of(checkpoint)
    with new_file(out) as part:
        proof.facts |= _facts(write_adapter_file(checkpoint, part, quant), part)
        if verify:
            proof.facts["weights"] = check_adapter_file(checkpoint, part, quant)
            reference = reference_logprobs(checkpoint, prompt_tokens(checkpoint), device)
            proof.add(compare_adapter_read_back(checkpoint, part, export, quant, reference, device))
            if has_llama_cpp(proof):
                base = temporary_path(out, "base")
                try:
                    write_model_file(checkpoint, base, "f32", merge=False)
                    export += ", on base f32"
                    proof.add(
                        compare_in_llama_cpp(checkpoint, base, part, export, quant, reference)
                    )
                finally:
                    base.unlink(missing_ok=True)
        _write_proof(proof, out, part)
    return proof


def _check_file(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Returns the path of a new GGUF file; raises ``ConfigurationError`` if it cannot be one."""
    found = local_path(path, "out").absolute()
    if found.suffix != _SUFFIX or found.is_dir():
        raise ConfigurationError(
            f"out: got {path}, expected the name of a file that ends in {_SUFFIX}, such as "
            f"{found.name or 'model'}{_SUFFIX}"
        )
    if found.exists() and not overwrite:
        raise ConfigurationError(
            f"out: {found} exists already; choose another name, or set overwrite=True to "
            "replace it once the new file is complete"
        )
    return found


def _facts(facts: dict[str, str], part: Path) -> dict[str, str]:
    # Measured before the comparison, which loads the whole model.
    return {
        "size": f"{part.stat().st_size / 2**20:.1f} MiB",
        "peak memory of writing": f"{peak_memory_bytes() / 2**20:.0f} MiB",
        **facts,
    }


def _next_to(out: Path, suffix: str) -> Path:
    return out.with_name(out.name.removesuffix(_SUFFIX) + suffix)


def _write_proof(proof: Proof, out: Path, part: Path) -> None:
    proof.files = {out.name: file_digest(part)}
    write_atomically(_next_to(out, ".proof.json"), proof.encoded())


def _write_modelfile(checkpoint: Checkpoint, out: Path) -> Path:
    name, _ = resolve_renderer_name(checkpoint.base_model, checkpoint.metadata.get(RENDERER))
    context = int(Architecture.of(checkpoint.base_folder).config.max_position_embeddings)
    path = _next_to(out, ".Modelfile")
    write_atomically(path, modelfile(checkpoint.base_folder, name, out.name, context).encode())
    return path
