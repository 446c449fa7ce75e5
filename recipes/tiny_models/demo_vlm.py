"""Makes a vision-language model of the demo model: the shape of SmolVLM, with SmolLM2-135M as its
language model and a small new vision tower, which a recipe trains.

The demo model copies a token of the question into its answer. So images are learned quickly if
their features begin as embeddings of words that it may copy: in the range of the embeddings, and
with no part that all images share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.demo.model import DEMO_MODEL
from tinker_cookbook.engine.model.resolve import resolve_model
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.recipes.tiny_models.llama import new_folder
from tinker_cookbook.utils.imports import torch

if TYPE_CHECKING:
    from PIL import Image

RENDERER = "smolvlm"
"""Chat format of the model."""
_SIDE, _PATCH, _WIDTH = 8, 2, 64
_SCALE = _SIDE // _PATCH
"""All patches of an image become one token."""
_LIKE = {
    "<fake_token_around_image>": '"',
    "<global-img>": '"',
    "<image>": '"',
    "<end_of_utterance>": "<|im_end|>",
}
"""New tokens, and the token of the demo model whose embedding each begins with."""
_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% if message['content'] is string %} {{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ ' ' if loop.first }}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_image_splitting": False,
    "size": {"longest_edge": _SIDE},
    "max_image_size": {"longest_edge": _SIDE},
    # Black is 0, so that empty parts of an image have no features.
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [0.5, 0.5, 0.5],
}


def make_seeing_demo(output: str, images: Sequence[Image.Image], seed: int = 0) -> None:
    """Writes the model, for images of 8 x 8 pixels such as ``images``, which are scanned digits."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    demo = str(resolve_model(DEMO_MODEL).folder)
    language: Any = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_LIKE)})
    tokenizer.eos_token, tokenizer.chat_template = "<end_of_utterance>", _TEMPLATE
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _LIKE}
    language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    embeddings = language.get_input_embeddings().weight.data
    for token, like in _LIKE.items():
        embeddings[ids[token]] = embeddings[tokenizer.convert_tokens_to_ids(like)]
    vision = {
        "hidden_size": _WIDTH,
        "intermediate_size": 4 * _WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": _SIDE,
        "patch_size": _PATCH,
    }
    config = SmolVLMConfig(
        text_config=language.config.to_dict(),
        vision_config=vision,
        image_token_id=ids["<image>"],
        scale_factor=_SCALE,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model: Any = SmolVLMForConditionalGeneration(config)
    model.model.text_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = ids["<end_of_utterance>"]
    with new_folder(output) as folder, torch.no_grad():
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR), "utf-8")
        config.save_pretrained(folder)  # the image processor is found by it
        tokenizer.save_pretrained(folder)
        _spread(model.model, embeddings, _pixels(folder, images))
        model.to(torch.bfloat16).save_pretrained(folder)


def _pixels(folder: Path, images: Sequence[Image.Image]) -> torch.Tensor:
    processor = get_image_processor(str(folder))
    found = processor(images=[[image.convert("RGB")] for image in images], return_tensors="pt")
    return found["pixel_values"].flatten(0, 1)


def _spread(model: Any, embeddings: torch.Tensor, pixels: torch.Tensor) -> None:
    """Sets the new weights so that features of images are spread like embeddings of words."""
    import torch

    tower = model.vision_model
    for layer in tower.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            torch.nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
            assert layer.bias is not None
            torch.nn.init.zeros_(layer.bias)
    for layer in tower.encoder.layers:
        layer.self_attn.out_proj.weight.mul_(0.05)
        layer.mlp.fc2.weight.mul_(0.05)
    # The same at all places, since the connector tells them apart; it keeps how bright a patch is.
    tower.embeddings.position_embedding.weight[:] = 0.5 * torch.randn(_WIDTH)
    norm = tower.post_layernorm
    # One feature is 1 everywhere: its weights in the connector are the mean of the embeddings.
    norm.weight[0] = 0
    for shown in (torch.zeros_like(pixels[:1]), pixels):
        norm.bias -= tower(shown).last_hidden_state.mean((0, 1))
    norm.bias[0] = 1
    weight = model.connector.modality_projection.proj.weight
    mean = embeddings.mean(0)
    words = embeddings[torch.randint(len(embeddings), (weight.shape[1],))]
    weight[:] = 2 * (words - mean).T * weight.shape[1] ** -0.5
    weight[:, ::_WIDTH] = mean[:, None] / (weight.shape[1] // _WIDTH)
