"""Converts between the types of the ``tinker`` SDK and the engine.

Loaded only through ``connect()``, so it may import the SDK at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import tinker
from tinker import types
from tinker.types.topk_logprobs import TopkLogprobs

from tinker_cookbook.engine.sampling.requests import PromptScores, Sample
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.training.run import LossOutput
from tinker_cookbook.engine.vision.images import ImageInput, is_image, joined
from tinker_cookbook.engine.vision.processing import ImageReader
from tinker_cookbook.exceptions import (
    BackendError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.image_processing_utils import read_media

MakeReader: TypeAlias = "Callable[[], ImageReader]"


class LocalSampleResponse(types.SampleResponse):
    """The SDK's response with what only the bundled engine tells.

    ``sampling_adjustments`` has the names of the ``LogitOptions`` in effect, such as
    ``token_mask``. The log-probabilities are the model's own, without these options.
    ``entropies`` has those of each sequence's tokens if ``Engine.sample_entropies`` is set.
    """

    sampling_adjustments: tuple[str, ...] = ()
    entropies: list[list[float]] | None = None


class TokenSequence(NamedTuple):
    """Token ids [T] int64 of a model input, and its images."""

    tokens: np.ndarray
    images: tuple[ImageInput, ...] = ()


def sequence_of(model_input: types.ModelInput, where: str, reader: MakeReader) -> TokenSequence:
    """Returns the token ids and images of an input; ``reader`` is called if it has an image."""
    parts: list[np.ndarray | ImageInput] = []
    for index, chunk in enumerate(model_input.chunks):
        if isinstance(chunk, types.EncodedTextChunk):
            tokens = np.asarray(chunk.tokens, dtype=np.int64)
            if is_image(tokens).any():  # ids that the engine itself gives to images
                raise DataValidationError(
                    f"{where}: chunk {index} holds token id {tokens.max()}, expected ids of the "
                    "model's vocabulary"
                )
            parts.append(tokens)
            continue
        at = f"{where}: chunk {index}"
        if isinstance(chunk, types.ImageAssetPointerChunk):
            try:
                data = read_media(chunk.location)
            except DataFormatError as error:
                raise DataValidationError(f"{at}: {error}") from error
        elif isinstance(chunk, types.ImageChunk):
            data = chunk.data
        else:
            raise DataValidationError(
                f"{at}: has the type {chunk.type!r}; the local engine supports text tokens "
                "(encoded_text) and images (image, image_asset_pointer)"
            )
        parts.append(reader().read(data, chunk.expected_tokens, at))
    return TokenSequence(*joined(parts, where))


def examples_of(data: Sequence[tinker.Datum], reader: MakeReader) -> list[Example]:
    """Converts SDK datums to engine examples; shares arrays if their types match."""
    out = []
    for index, datum in enumerate(data):
        sequence = sequence_of(datum.model_input, f"datum {index}: model_input", reader)
        inputs = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
        out.append(Example(sequence.tokens, inputs, sequence.images))
    return out


def custom_examples_of(
    data: Sequence[tinker.Datum], reader: MakeReader, *, trained_only: bool
) -> list[Example]:
    """Returns examples for a custom loss: tokens, targets and, with ``trained_only``, weights."""
    out = []
    for example in examples_of(data, reader):
        inputs = {n: v for n, v in example.inputs.items() if n in ("target_tokens", "weights")}
        if not trained_only and "target_tokens" in inputs:
            # They are checked like the inputs of cross_entropy, which requires weights.
            inputs["weights"] = np.zeros(inputs["target_tokens"].shape, dtype=np.float32)
        out.append(replace(example, inputs=inputs))
    return out


def loss_output_of(output: LossOutput) -> types.ForwardBackwardOutput:
    """Returns the SDK's response to ``forward`` and ``forward_backward``."""
    return types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"logprobs": types.TensorData.from_numpy(v)} for v in output.logprobs],
        metrics=output.metrics,
    )


def adam_settings_of(params: types.AdamParams) -> AdamSettings:
    """Returns checked settings of one optimizer step; other optimizers are refused."""
    if not isinstance(params, types.AdamParams):
        raise BackendError(
            f"optim_params: got {type(params).__name__}; the local engine only has AdamW, so give "
            "AdamParams"
        )
    return AdamSettings(**params.model_dump())


def sample_response_of(
    samples: Sequence[Sample],
    scores: PromptScores,
    targets: np.ndarray | None,
    sequence_ids: Sequence[str],
    adjustments: tuple[str, ...] = (),
) -> LocalSampleResponse:
    """Returns the SDK's response; ``targets`` [T - 1, K] are token ids whose scores were requested,
    ``sequence_ids`` are unique among all clients, ``adjustments`` the options that changed the
    sampling."""
    requested = None
    if targets is not None and scores.target_logprobs is not None:
        # Skipped entries were scored as token 0; the protocol requires 0.0 for them.
        filled = np.where(targets < 0, np.float32(0), scores.target_logprobs)
        requested = types.TensorData.from_numpy(filled)
    topk = None
    if scores.topk_ids is not None and scores.topk_logprobs is not None:
        topk = TopkLogprobs(scores.topk_ids, scores.topk_logprobs)
    sequences = []
    for sample, sequence_id in zip(samples, sequence_ids, strict=True):
        best = None
        if sample.topk:
            ids, values = (np.stack(part) for part in zip(*sample.topk, strict=True))
            best = TopkLogprobs(ids.astype(np.int32), values)
        sequences.append(
            types.SampledSequence(
                stop_reason="stop" if sample.stop_reason == "stop" else "length",
                sequence_id=sequence_id,
                tokens_np=np.asarray(sample.tokens, dtype=np.int32),
                logprobs_np=np.asarray(sample.logprobs, dtype=np.float32),
                topk_logprobs_np=best,
            )
        )
    response = LocalSampleResponse(
        sequences=sequences,
        prompt_logprobs_np=scores.logprobs,
        topk_prompt_logprobs_np=topk,
        target_prompt_logprobs=requested,
        prompt_cache_hit_tokens=samples[0].cached_prompt_tokens,
    )
    response.sampling_adjustments = adjustments
    if any(sample.entropies for sample in samples):
        response.entropies = [sample.entropies for sample in samples]
    return response
