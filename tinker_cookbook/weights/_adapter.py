"""Writes an adapter as a folder that ``PeftModel.from_pretrained`` and vLLM load."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tinker_cookbook.engine.checkpoints import format as fmt
from tinker_cookbook.engine.model.loading import empty_model
from tinker_cookbook.exceptions import WeightsAdapterError
from tinker_cookbook.weights._chat_files import (
    GENERATION,
    TEMPLATE,
    chat_of,
    copy_tokenizer,
    write_chat_files,
)
from tinker_cookbook.weights._merge import is_tied, loaded_model
from tinker_cookbook.weights._modules import HEAD
from tinker_cookbook.weights._output import check_output, new_folder
from tinker_cookbook.weights._source import (
    RENDERER,
    Checkpoint,
    low_rank_updates,
    open_adapter_folder,
    read_adapter,
)
from tinker_cookbook.weights._vllm_proof import compare_in_vllm, loading_in_vllm
from tinker_cookbook.weights.proof import (
    Proof,
    compare_model,
    image_prompts,
    prompt_tokens,
    reference_logprobs,
    scored,
)


def build_lora_adapter(
    *,
    base_model: str,
    adapter_path: str,
    output_path: str,
    trust_remote_code: bool | None = None,
    verify: bool = True,
    renderer_name: str | None = None,
) -> None:
    """Converts an adapter of the Tinker service or of the engine to PEFT's format.

    Args:
        base_model: Hub name or folder of the base model.
        adapter_path: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        output_path: New folder.
        trust_remote_code: Accepted for compatibility; code of a model never runs.
        verify: Load the result with PEFT and compare its log-probabilities with the engine's.
        renderer_name: Chat format of the run; default: the one that the adapter's files name. Its
            chat template and stops are written.

    Raises:
        FileNotFoundError: A file of the adapter is missing.
        FileExistsError: ``output_path`` exists.
        WeightsAdapterError: The adapter does not fit this model, or the result disagrees with the
            engine; nothing is written.
    """
    out = check_output(output_path)
    checkpoint = open_adapter_folder(adapter_path, base_model).with_renderer(renderer_name)
    with new_folder(out) as folder:
        write_adapter(checkpoint, folder, verify=verify)


def write_adapter(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    verify: bool = True,
    device: str = "auto",
    vllm_python: str | None = None,
) -> Proof:
    """Writes adapter and ``proof.json`` into an existing folder; returns the proof.

    ``vllm_python`` is the Python of an environment with vLLM, to compare vLLM's results too.

    Raises:
        WeightsError: vLLM does not load the adapter.
        WeightsAdapterError: Adapter and base model do not fit, or PEFT or vLLM computes other
            log-probabilities than the engine.
    """
    proof = Proof.of(checkpoint)
    config = {**checkpoint.config, "base_model_name_or_path": checkpoint.base_model}
    # Lists that include parameters of experts are already exact.
    if not any(update.experts for update in checkpoint.updates.values()):
        config |= _peft_targets(checkpoint)
    # PEFT's prefix, followed by the module's name in transformers.
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": tensor
        for module, update in checkpoint.updates.items()
        for side, tensor in (("A", update.a), ("B", update.b))
    }
    # What a merge of this folder needs to know of the training.
    header = {
        name: checkpoint.metadata[name]
        for name in (fmt.BASE_DIGEST, RENDERER)
        if checkpoint.metadata.get(name)
    }
    content = fmt.encode_tensors(tensors, header)
    (folder / fmt.ADAPTER_CONFIG).write_bytes(fmt.encode_json(config, "adapter_config", 2))
    (folder / fmt.ADAPTER).write_bytes(content)
    proof.facts["size"] = f"{len(content) / 2**20:.1f} MiB"
    _write_chat(checkpoint, folder, proof)
    if HEAD in checkpoint.updates and is_tied(checkpoint.base_folder):
        proof.facts["head"] = (
            "the adapter changes the head, which is tied to the input embeddings: PEFT's "
            "merge_and_unload would change both; `python -m tinker_cookbook.weights merge` merges "
            "it exactly"
        )
    if verify:
        proof.facts["weights"] = _check_factors(checkpoint, folder)
        prompts = [*prompt_tokens(checkpoint), *image_prompts(checkpoint, proof)]
        reference = reference_logprobs(checkpoint, prompts, device)
        prompts = scored(prompts, reference, proof)
        name, reader = "LoRA adapter, float32", f"peft {version('peft')}"
        loaded = _peft_model(checkpoint, folder)
        compared = compare_model(name, reader, reference, loaded, prompts)
        proof.add(compared, WeightsAdapterError)
        if vllm_python is not None:
            model, bound = checkpoint.base_folder, compared.bound
            compared = compare_in_vllm(
                vllm_python, checkpoint, model, folder, name, reference, bound=bound
            )
            proof.add(compared, WeightsAdapterError)
    proof.write(folder)
    return proof


def _write_chat(checkpoint: Checkpoint, folder: Path, proof: Proof) -> None:
    """Writes the tokenizer with the run's chat template and stops."""
    chat = chat_of(checkpoint)
    copy_tokenizer(checkpoint.base_folder, folder)
    write_chat_files(chat, checkpoint.base_folder, folder)
    proof.facts |= chat.facts
    proof.facts["vLLM"] = loading_in_vllm(checkpoint)
    if RENDERER in checkpoint.metadata and proof.facts["vLLM"].startswith("vllm serve"):
        # vLLM takes both from the base model otherwise.
        if (folder / GENERATION).is_file():
            proof.facts["vLLM"] += " --generation-config FOLDER"
        if not chat.own and chat.template is not None:
            proof.facts["vLLM"] += f" --chat-template FOLDER/{TEMPLATE}"


def _check_factors(checkpoint: Checkpoint, folder: Path) -> str:
    """Checks that the files have exactly the factors and the scaling of each update."""
    config, tensors, _ = read_adapter(folder)
    found = low_rank_updates(tensors, config, str(folder))
    for module, update in checkpoint.updates.items():
        one = found.pop(module, None)
        if (
            one is None
            or (one.scaling, one.experts) != (update.scaling, update.experts)
            or not (torch.equal(one.a, update.a) and torch.equal(one.b, update.b))
        ):
            raise WeightsAdapterError(
                f"{module}: the written adapter has another update than the checkpoint; the "
                "export was not kept"
            )
    if found:
        raise WeightsAdapterError(f"the checkpoint has no updates of {sorted(found)[:3]}")
    return f"the factors of each of the {len(checkpoint.updates)} updates, exactly"


def _peft_model(checkpoint: Checkpoint, folder: Path) -> Any:
    from peft import PeftModel

    base = loaded_model(checkpoint.base_folder)
    with warnings.catch_warnings():
        # PEFT warns about adapters on a tied head; the comparison covers this case.
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base, str(folder))


def _peft_targets(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the entries of PEFT's config that select exactly the modules with updates: suffixes
    of their names if these are unambiguous, else the full names."""
    ends = sorted({module.rpartition(".")[2] for module in checkpoint.updates})
    full = {"target_modules": sorted(checkpoint.updates), "exclude_modules": None}
    model = empty_model(checkpoint.base_folder)
    modules = [] if model is None else [name for name, _ in model.named_modules()]
    # PEFT would also adapt other modules with these suffixes, for which there are no tensors.
    others = {m for m in modules if m.rpartition(".")[2] in ends} - checkpoint.updates.keys()
    return full if others - {HEAD} else {**full, "target_modules": ends}
