"""Makes vision-language models that recipes train: small, with a vision tower of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.recipes.tiny_models.llama import (
    TinyModelSettings,
    fit,
    new_folder,
    word_tokenizer,
)
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.imports import torch

if TYPE_CHECKING:
    from PIL import Image

RENDERER = "qwen3_vl_instruct"
"""Chat format of the tiny model."""
_SPECIAL = (
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Digits are tokens of their own, so that a number of two digits is two choices of ten.
_PIECES = r"\n|\d| ?[A-Za-z]+|[^\w\n]| "
_ROLES = "system\nuser\nassistant\n0123456789 .,?!"


@dataclass(frozen=True)
class Example:
    """A conversation for the training of a tiny model: tokens with a loss weight each, in which
    every position of the image has the model's image token, and the image."""

    tokens: Sequence[int]
    weights: Sequence[float]
    image: Image.Image


def make_tiny_vlm(
    output: str,
    texts: Iterable[str],
    examples: Callable[[Path], Sequence[Example]] | None = None,
    settings: TinyModelSettings | None = None,
) -> None:
    """Writes a Qwen3-VL of 1.6 million parameters, with a token for each word of ``texts``.

    An image has a token for each 8 x 8 pixels, and is made larger if it has less than 16 x 16. The
    weights are random, or trained on the ``examples`` that a function makes for its tokenizer.
    """
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings = settings or TinyModelSettings(output=output)
    with new_folder(output) as folder:
        tokenizer = word_tokenizer(
            [*texts, _ROLES],
            _PIECES,
            folder,
            _SPECIAL,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=list(_SPECIAL[2:]),
        )
        config = Qwen3VLConfig(
            text_config=_text(len(tokenizer)), vision_config=_vision(), **_ids(tokenizer)
        )
        torch.manual_seed(settings.seed)
        model = Qwen3VLForConditionalGeneration(config)
        assert model.generation_config is not None
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        # Written before the training too, since the examples need tokenizer and image processor.
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR), "utf-8")
        model.save_pretrained(folder)
        if examples is not None:
            processor = get_image_processor(str(folder))
            fit(settings, examples(folder), partial(_loss, model, processor), model)
            model.save_pretrained(folder)


def example_of(folder: Path, messages: list[Message], image: Image.Image) -> Example:
    """Returns a conversation with one image, rendered for the tiny model in ``folder``."""
    tokenizer = get_tokenizer(str(folder))
    processor = get_image_processor(str(folder))
    renderer = get_renderer(RENDERER, tokenizer, image_processor=processor)
    model_input, weights = renderer.build_supervised_example(messages)
    token: Any = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    tokens: list[int] = []
    for chunk in model_input.chunks:
        tokens += chunk.tokens if chunk.type == "encoded_text" else [token] * chunk.length
    return Example(tokens, weights.tolist(), image)


def _loss(model: Any, processor: Any, batch: Sequence[Example]) -> torch.Tensor:
    """Returns the weighted mean loss of a batch."""
    import torch

    longest = max(len(example.tokens) for example in batch)
    # Padding is on the right, where no token of an example sees it, and has no weight.
    tokens_BL = torch.tensor([[*e.tokens, *[0] * (longest - len(e.tokens))] for e in batch])
    weights_BL = torch.tensor([[*e.weights, *[0.0] * (longest - len(e.weights))] for e in batch])
    lengths_B = torch.tensor([len(example.tokens) for example in batch])
    images = processor(images=[example.image for example in batch], return_tensors="pt")
    logits_BLV = model(
        input_ids=tokens_BL,
        attention_mask=(torch.arange(longest) < lengths_B[:, None]).long(),
        mm_token_type_ids=(tokens_BL == model.config.image_token_id).long(),
        **images,
    ).logits
    trained_BL = weights_BL[:, 1:] != 0
    return torch.nn.functional.cross_entropy(
        logits_BLV[:, :-1][trained_BL], tokens_BL[:, 1:][trained_BL]
    )


def _ids(tokenizer: Any) -> dict[str, Any]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _text(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": _WIDTH,
        "intermediate_size": 3 * _WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": _WIDTH // 4,
        "max_position_embeddings": 1024,
        "initializer_range": _SPREAD,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
        },
    }


def _vision() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_heads": 4,
        "out_hidden_size": _WIDTH,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": _SPREAD,
    }


_WIDTH = 128
# The default of 0.02 suits large models; with it, a small one starts learning much later.
_SPREAD = 0.08
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1 << 16},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
