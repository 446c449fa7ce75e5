"""Images in messages, as chunks with the number of tokens of the model's image processor.

PNG and JPEG images in RGB are sent unchanged; others are converted to a PNG of the same pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from tinker_cookbook.exceptions import DataFormatError, RendererError, TinkerCookbookError
from tinker_cookbook.image_processing_utils import (
    ImageSource,
    get_image_processor,
    open_image,
    png_bytes,
    resize_image,
    rgb_image,
    source_name,
)
from tinker_cookbook.image_text_processor import ImageTextProcessor, get_image_text_processor
from tinker_cookbook.renderers.core.messages import Message, ensure_list
from tinker_cookbook.renderers.core.rendered import Piece
from tinker_cookbook.tokenizer_utils import tokenizer_name
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    from tinker_cookbook.renderers.core.renderer import Renderer

Segment: TypeAlias = "str | tinker.types.ImageChunk"
Segments: TypeAlias = Sequence[Segment]
"""Text and images of a message, in order."""


class ImageProcessorProtocol(Protocol):
    """Image processor as renderers need it; those of transformers for Qwen-VL conform."""

    @property
    def merge_size(self) -> int:
        """Side of the square of patches that becomes one token."""
        ...

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: dict[str, Any] | None = None
    ) -> int:
        """Returns the number of patches of an image of this size, after resizing."""
        ...

    def get_resize_config(self, image_data: dict[str, Any]) -> dict[str, Any]:
        """Returns ``num_tokens`` of ``{"type": "image", "image": …}``; Kimi's processors have this
        instead of patches."""
        ...


def image_to_chunk(
    image_or_str: ImageSource,
    image_processor: ImageProcessorProtocol | ImageTextProcessor,
    max_image_size: int | None = None,
    line_break_tokens: int = 1,
) -> tinker.types.ImageChunk:
    """Returns the image as a chunk with the number of tokens that the processor counts.

    ``max_image_size`` limits the longest side in pixels; ``line_break_tokens`` are the tokens of
    two line breaks, which Idefics3 writes between the tiles and the whole image. Raises
    RendererError for anything but a local image, and for a shape that the processor rejects.
    """
    try:
        opened, data = open_image(image_or_str)
        image = rgb_image(opened)
    except DataFormatError as error:
        raise RendererError(str(error)) from error
    if max_image_size:
        image = resize_image(image, max_image_size)
    # Send the original bytes where the image was not changed. Of an animation send only the first
    # frame, since a server may take another one.
    kind: Literal["png", "jpeg"] = "jpeg" if opened.format == "JPEG" else "png"
    changed = image is not opened or getattr(opened, "is_animated", False)
    if data is None or changed or opened.format not in ("PNG", "JPEG"):
        data, kind = png_bytes(image), "png"
    try:
        tokens = _count_tokens(image, image_processor, line_break_tokens)
    except RendererError:
        raise
    except ValueError as error:
        name = f" {source_name(image_or_str)}:" if data is not None else ""
        width, height = image.size
        raise RendererError(
            f"image:{name} the image processor refuses {width} x {height} pixels: {error}; "
            "crop the image or pad it"
        ) from error
    return tinker.types.ImageChunk(data=data, format=kind, expected_tokens=tokens)


def _count_tokens(image: Any, processor: Any, line_break_tokens: int) -> int:
    """Returns the number of tokens of an image; raises RendererError, and ValueError for a shape
    that the processor refuses."""
    width, height = image.size
    if isinstance(processor, ImageTextProcessor):
        return processor.count(image)
    if hasattr(processor, "get_resize_config"):  # processors of Kimi models
        config = processor.get_resize_config({"type": "image", "image": image})
        return int(config["num_tokens"])
    each = getattr(processor, "image_seq_len", None)
    if hasattr(processor, "do_pan_and_scan"):  # Gemma 3: the same for every size
        if each is not None and not processor.do_pan_and_scan:
            return each
    elif hasattr(processor, "get_number_of_image_patches"):
        found = processor.get_number_of_image_patches(height, width, {})
        if not isinstance(found, tuple):
            # Qwen-VL merges merge_size x merge_size patches into one token.
            return found // processor.merge_size**2
        if each is not None:  # Idefics3 and SmolVLM
            _, rows, columns = found
            # Before each tile two marks, after each row a line break; around the whole image three
            # marks, and before it a line break, which follows that of the last row.
            tiles = rows * (columns * (each + 2) + 1) + (line_break_tokens - 1) * bool(rows)
            return tiles + each + 3
    raise RendererError(
        f"image_processor: got {type(processor).__name__}, expected one that has "
        "get_number_of_image_patches (Qwen-VL) or get_resize_config (Kimi), or that of Idefics3, "
        "SmolVLM or Gemma 3 (without pan and scan) by get_image_processor(model_name), which adds "
        "image_seq_len"
    )


def content_segments(
    message: Message,
    idx: int,
    renderer: Renderer,
    around: tuple[str, str],
    max_image_size: int | None = None,
) -> Segments:
    """Returns text and images of a message, each image between the two texts of ``around``.

    Images are counted by the image processor of ``renderer``, by default that of its model. Raises
    RendererError for other parts.
    """
    segments: list[Segment] = []
    for i, part in enumerate(ensure_list(message["content"])):
        where = f"messages[{idx}].content[{i}]"
        if part["type"] == "text":
            segments.append(part["text"])
            continue
        if part["type"] != "image":
            raise RendererError(
                f"{where}: {renderer._name} cannot write a part of type {part['type']!r} in a "
                f"message of role {message['role']!r}, expected text or image"
            )
        try:
            breaks = len(renderer.codec.encode("\n\n"))
            processor = _image_processor(renderer)
            chunk = image_to_chunk(part["image"], processor, max_image_size, breaks)
        except RendererError as error:
            raise RendererError(f"{where}: {error}") from error
        segments += [around[0], chunk, around[1]]
    return segments


def image_text_processor(renderer: Renderer) -> ImageTextProcessor:
    """Returns the renderer's processor of texts with images, or that of its model."""
    if isinstance(renderer.image_processor, ImageTextProcessor):
        return renderer.image_processor
    return _of_model(renderer, get_image_text_processor)


def _image_processor(renderer: Renderer) -> ImageProcessorProtocol:
    """Returns the renderer's image processor, or that of its model, which is loaded once."""
    if renderer.image_processor is not None:
        return renderer.image_processor
    return _of_model(renderer, get_image_processor)


def _of_model(renderer: Renderer, load: Callable[[str], Any]) -> Any:
    name = renderer.model_name or tokenizer_name(renderer.tokenizer)
    try:
        # None for the models of the tml-renderers package, which have a renderer of their own.
        found = load(name) if name else None
    except TinkerCookbookError as error:
        raise RendererError(
            f"got an image, but no image processor of the model, which counts its tokens: {error}"
        ) from error
    if found is None:
        raise RendererError(
            "got an image, but the renderer has no image processor, which counts its tokens, and "
            f"the tokenizer's name ({name!r}) leads to none; make the renderer with get_renderer("
            "NAME, tokenizer, image_processor=get_image_processor(model_name))"
        )
    return found


def trim_segments(segments: Segments) -> Segments:
    """Returns the segments without white space at both ends."""
    merged = list(_merged(segments))
    if merged and isinstance(merged[0], str):
        merged[0] = merged[0].lstrip()
    if merged and isinstance(merged[-1], str):
        merged[-1] = merged[-1].rstrip()
    return merged


def encode_segments(segments: Segments, encode: Callable[[str], list[int]]) -> list[Piece]:
    """Returns the tokens of each run of text, and the images between them."""
    return [encode(part) if isinstance(part, str) else part for part in _merged(segments)]


def _merged(segments: Segments) -> Segments:
    merged: list[Segment] = []
    for segment in segments:
        if isinstance(segment, str) and merged and isinstance(merged[-1], str):
            merged[-1] += segment
        else:
            merged.append(segment)
    return merged
