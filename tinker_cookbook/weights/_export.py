"""Writes base model and adapter as one model in transformers format."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tinker_cookbook.engine.memory import release_cached_memory
from tinker_cookbook.exceptions import ConfigurationError, WeightsMergeError, nearest
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights._chat_files import chat_of, write_chat_files
from tinker_cookbook.weights._experts import by_file, changed_matrix
from tinker_cookbook.weights._merge import (
    MergeReport,
    check_merge_dtype,
    check_merged_files,
    check_stored,
    copy_small_files,
    is_tied,
    loaded_model,
    merge_files,
    peak_memory_bytes,
    weight_files,
)
from tinker_cookbook.weights._modules import HEAD
from tinker_cookbook.weights._output import check_output, new_folder
from tinker_cookbook.weights._source import Checkpoint, open_adapter_folder
from tinker_cookbook.weights._tensor_files import read_header
from tinker_cookbook.weights._vllm_proof import compare_in_vllm
from tinker_cookbook.weights.proof import (
    PROMPTS,
    Proof,
    compare_model,
    image_prompts,
    prompt_tokens,
    reference_logprobs,
    scored,
)

STRATEGIES = ("auto", "shard", "full")
ROUNDED = 0.1
"""Largest allowed mean difference, in nats, of a model with weights rounded to 16 bits."""


def build_hf_model(
    *,
    base_model: str,
    adapter_path: str,
    output_path: str,
    dtype: str = "bfloat16",
    trust_remote_code: bool | None = None,
    merge_strategy: str = "auto",
    dequantize: bool = False,
    quantize: str | None = None,
    serving_format: str | None = None,
    device: str | None = None,
    verify: bool = True,
    renderer_name: str | None = None,
) -> None:
    """Merges an adapter into its base model.

    Args:
        base_model: Hub name or folder of the base model.
        adapter_path: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        output_path: New folder for weights, ``config.json``, tokenizer and ``proof.json``.
        dtype: ``bfloat16``, ``float16`` or ``float32`` for the result; the merge is in float32.
        trust_remote_code: Accepted for compatibility; code of a model never runs.
        merge_strategy: ``shard`` reads the files in blocks, ``full`` loads the model with
            transformers; ``auto`` is ``shard`` if the base model has safetensors files.
        dequantize: Not supported.
        quantize: Not supported.
        serving_format: Not supported.
        device: Device for the verification.
        verify: Load the result and compare its log-probabilities with the engine's.
        renderer_name: Chat format of the run; default: the one that the adapter's files name. Its
            chat template and stops are written.

    Raises:
        FileNotFoundError: A file of the adapter is missing.
        FileExistsError: ``output_path`` exists.
        ConfigurationError: A value is unknown or not supported.
        NotImplementedError: ``dequantize`` is true.
        WeightsMergeError: The adapter does not fit this model, the base model is quantized, or the
            result disagrees with the engine; nothing is written.
    """
    check_merge_dtype(dtype)
    check_strategy(merge_strategy)
    # Values of the official package that this package does not support.
    for name, value in (("quantize", quantize), ("serving_format", serving_format)):
        if value is not None:
            raise ConfigurationError(
                f"{name}: got {value!r}, which is not supported: the merged model is not "
                f"quantized. Leave {name} out, and quantize the result with the tools of vLLM"
            )
    if dequantize:
        raise NotImplementedError(
            "dequantize=True is not supported; give a base model in bfloat16, float16 or float32"
        )
    out = check_output(output_path)
    checkpoint = open_adapter_folder(adapter_path, base_model, WeightsMergeError)
    checkpoint = checkpoint.with_renderer(renderer_name)
    with new_folder(out) as folder:
        write_merged(
            checkpoint,
            folder,
            dtype=dtype,
            strategy=merge_strategy,
            verify=verify,
            device=device or "auto",
        )


def check_strategy(strategy: str) -> None:
    """Raises ``ConfigurationError`` for an unknown merge strategy."""
    if strategy not in STRATEGIES:
        raise ConfigurationError(
            f"merge_strategy: got {strategy!r}, expected one of {', '.join(STRATEGIES)}"
            f"{nearest(strategy, STRATEGIES)}"
        )


def write_merged(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: str = "bfloat16",
    strategy: str = "auto",
    verify: bool = True,
    device: str = "auto",
    vllm_python: str | None = None,
) -> Proof:
    """Writes the merged model and ``proof.json`` into an existing folder; returns the proof.

    ``vllm_python`` is the Python of an environment with vLLM, to compare vLLM's results too.

    Raises:
        WeightsError: vLLM does not load the model.
        WeightsMergeError: Adapter and base model do not fit, or the merged model computes other
            log-probabilities than the engine.
    """
    if checkpoint.weights:
        if strategy == "shard":
            raise ConfigurationError(
                f"merge_strategy: got 'shard', but {checkpoint.name} has all weights "
                "(lora_rank=0), which are written at once; expected auto or full"
            )
        strategy = "full"
    elif strategy == "auto":
        try:
            files = weight_files(checkpoint.base_folder)
            by_file(checkpoint.updates, {k for f in files for k in read_header(f)}, "")
            strategy = "shard"
        except WeightsMergeError:
            strategy = "full"
    merge = merge_files if strategy == "shard" else _merge_loaded
    report = merge(checkpoint, folder, dtype)
    chat = chat_of(checkpoint)
    write_chat_files(chat, checkpoint.base_folder, folder)
    proof = Proof.of(checkpoint)
    proof.facts |= report.facts(dtype) | chat.facts
    proof.facts["vLLM"] = "vllm serve FOLDER"
    if verify:
        _verify(checkpoint, folder, dtype, strategy, device, vllm_python, proof)
        proof.facts["peak memory with verification"] = f"{peak_memory_bytes() / 2**20:.0f} MiB"
    proof.write(folder)
    return proof


def _verify(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: str,
    strategy: str,
    device: str,
    vllm_python: str | None,
    proof: Proof,
) -> None:
    texts = prompt_tokens(checkpoint)
    prompts = [*texts, *image_prompts(checkpoint, proof)]
    tokenizer = get_tokenizer(str(folder))
    pairs = zip(PROMPTS, texts, strict=True)
    if any(tokenizer.encode(text)[: len(tokens)] != tokens for text, tokens in pairs):
        raise WeightsMergeError(
            f"the tokenizer of the merged model gives other tokens than the one of "
            f"{checkpoint.base_model}; nothing was written"
        )
    reference = reference_logprobs(checkpoint, prompts, device)
    prompts = scored(prompts, reference, proof)
    # The engine's model is freed, but the allocator keeps its pages.
    release_cached_memory(torch.device("cpu"))
    # Compute in float32, so that only the weights can cause a difference.
    model = loaded_model(folder)
    proof.facts["weights"] = _check_weights(checkpoint, folder, model, dtype, strategy)
    export, reader = f"merged model, {dtype}", f"transformers {version('transformers')}"
    rounded = None if dtype == "float32" else (ROUNDED, "mean")
    compared = compare_model(export, reader, reference, model, prompts, rounded)
    bound, measure = compared.bound, compared.measure
    proof.add(compared, WeightsMergeError)
    if vllm_python is not None:
        del model  # vLLM loads it again
        compared = compare_in_vllm(
            vllm_python, checkpoint, folder, None, export, reference, bound=bound, measure=measure
        )
        proof.add(compared, WeightsMergeError)


def _check_weights(
    checkpoint: Checkpoint, folder: Path, model: Any, dtype: str, strategy: str
) -> str:
    """Checks that each weight of the merged model is ``W + s B A`` (or ``W``), rounded once."""
    # Rounding to 16 bits changes log-probabilities more than some mistakes would.
    if strategy == "shard":
        count = check_merged_files(checkpoint, folder, dtype)
    else:
        wanted = _loaded_sum(checkpoint, MergeReport()).state_dict()
        found = model.state_dict()
        for name, expected in wanted.items():
            # The model was loaded in float32, which has every value of its files.
            rounded = (
                expected.to(getattr(torch, dtype)) if expected.is_floating_point() else expected
            )
            check_stored(name, found[name].to(rounded.dtype), rounded)
        count = len(wanted)
    source = "that of the run" if checkpoint.weights else "W + s B A, or that of the base model"
    return f"each of the {count} tensors is {source}, rounded once"


def _merge_loaded(checkpoint: Checkpoint, folder: Path, dtype: str) -> MergeReport:
    """Merges like ``merge_files``, but loads the whole model; for models without safetensors."""
    report = MergeReport(merged=len(checkpoint.weights or checkpoint.updates))
    model = _loaded_sum(checkpoint, report)
    target, state = getattr(torch, dtype), model.state_dict()
    for name, weight in state.items():
        if weight.is_floating_point():
            report.rounded(name, weight, target)
    report.tensors = len(state)
    model.to(target).save_pretrained(folder)
    copy_small_files(checkpoint.base_folder, folder)
    report.bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    report.peak_bytes = peak_memory_bytes()
    return report


def _loaded_sum(checkpoint: Checkpoint, report: MergeReport) -> Any:
    """Returns the base model in float32 with the updates added to its weights, or with the
    weights of a run that trained all of them."""
    model = loaded_model(checkpoint.base_folder)
    if checkpoint.weights:
        for name, parameter in model.named_parameters():
            weight = checkpoint.weights.get(name)
            if weight is None or weight.shape != parameter.shape:
                raise WeightsMergeError(
                    f"{checkpoint.name}: tensor {name!r} is missing or has another shape than in "
                    f"{checkpoint.base_model}; it is not its base model"
                )
            change = (weight - parameter.data).abs().max().item()
            report.largest_change = max(report.largest_change, change)
            parameter.data.copy_(weight)
        return model
    head = model.get_output_embeddings()
    if HEAD in checkpoint.updates and is_tied(checkpoint.base_folder):
        # Untie the head before it is changed.
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = False
        report.untied = True
    for module, update in checkpoint.updates.items():
        try:
            weight = head.weight.data if module == HEAD else changed_matrix(model, module, update)
        except AttributeError as error:
            raise WeightsMergeError(
                f"{checkpoint.name}: has an update of {module}, which {checkpoint.base_model} "
                "lacks; is it its base model?"
            ) from error
        delta = update.delta()
        if delta.shape != weight.shape:
            raise WeightsMergeError(
                f"{checkpoint.name}: the update of {module} has shape {tuple(delta.shape)}, "
                f"expected {tuple(weight.shape)}; {checkpoint.base_model} is not its base model"
            )
        report.largest_change = max(report.largest_change, delta.abs().max().item())
        weight.add_(delta)
    return model
