"""Images for the renderer tests, and transformers' own processor of them."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from rendering_cases import openai, text

SIZES = [(1, 1), (28, 28), (64, 48), (300, 20), (100, 333), (257, 255)]


@cache
def pictures():
    from PIL import Image

    return [
        Image.linear_gradient("L").resize(size).convert(mode)
        for size, mode in zip(SIZES, ["RGB", "RGB", "L", "RGBA", "P", "RGB"], strict=True)
    ]


@cache
def qwen_image_processor():
    """With the numbers of Qwen3-VL's preprocessor_config.json."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, size={"shortest_edge": 65_536, "longest_edge": 16_777_216}
    )


@cache
@st.composite
def with_images(draw, conversations):
    """Conversations in which what users and tools say may be text and images in any order."""
    part = st.one_of(
        st.builds(lambda t: {"type": "text", "text": t}, text),
        st.builds(
            lambda i: {"type": "image", "image": pictures()[i]}, st.integers(0, len(SIZES) - 1)
        ),
    )
    messages = []
    for message in draw(conversations):
        if message["role"] in ("user", "tool") and draw(st.integers(0, 2)) == 0:
            message = {**message, "content": draw(st.lists(part, max_size=3))}
        messages.append(message)
    return messages


def shown(message, parsed_arguments=False):
    """As the template takes it: an image is its type alone."""
    result = openai(message, parsed_arguments)
    content = message["content"]
    if isinstance(content, list) and any(part["type"] == "image" for part in content):
        result["content"] = [
            {"type": "image"} if part["type"] == "image" else dict(part) for part in content
        ]
    return result


def written_out(message):
    """For templates that know no images: the tags stand in the text."""
    content = message["content"]
    if not isinstance(content, list):
        return openai(message)
    tags = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"}
    return openai(
        {**message, "content": [tags if part["type"] == "image" else part for part in content]}
    )
