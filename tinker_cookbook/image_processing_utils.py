"""Image processors of models; reading images from files, data URIs and Pillow.

Needs Pillow (``pip install pillow``), which is imported at the first image.
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
import os
import re
import stat
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, ModelNotFoundError
from tinker_cookbook.tokenizer_utils import is_tml_renderers_model

if TYPE_CHECKING:
    from PIL import Image
    from transformers.image_processing_utils import BaseImageProcessor

    ImageProcessor: TypeAlias = BaseImageProcessor | None
else:
    # A type that does not need transformers, because importing it takes seconds.
    ImageProcessor = Any

ImageSource: TypeAlias = "Image.Image | bytes | str | os.PathLike[str]"
"""A Pillow image, the bytes of a file, a data URI, a ``file://`` URI or a local path."""

PINNED_REMOTE_CODE = {
    "moonshotai/Kimi-K2.5": "3367c8d1c68584429fab7faf845a32d5195b6ac1",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": (
        "533d66230b6e75518bf32d2d7a7b95a24c3dd517"
    ),
}
"""Models with image processor code in their repository, and the revision that runs by default."""

_THUMBNAIL_SIDE = 256  # pixels

_CONFIG_FILES = ("preprocessor_config.json", "processor_config.json")
_DATA_URI = re.compile(
    r"data:(?P<kind>image|audio)/[\w.+-]+(?P<options>(?:;[^;,]*)*),(?P<data>.*)", re.DOTALL
)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others run programs, or allocate by their header
_MOST_SCANS = 100
_MOST_BYTES = 512 << 20  # more than any file of as many pixels as Pillow's limit needs
_REMOTE = re.compile(r"(?!file:|data:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)

logger = logging.getLogger(__name__)
_lock = threading.RLock()


@cache
def get_image_processor(model_name: str) -> Any:
    """Returns transformers' image processor of a model, loaded once per process.

    ``get_image_processor.cache_clear()`` clears the cache. None for models whose images the
    tml-renderers package processes. Code of a model runs only if ``HF_TRUST_REMOTE_CODE=1`` is set,
    or at the revision that ``PINNED_REMOTE_CODE`` gives.

    Args:
        model_name: A folder with ``preprocessor_config.json``, or a Hub name that is cached or can
            be downloaded; a suffix ``:peft:…`` is ignored.

    Raises:
        ModelNotFoundError: There is no such model, or it has no image processor.
        ConfigurationError: The processor cannot be loaded.
    """
    if is_tml_renderers_model(str(model_name)):
        return None
    with _lock:  # imports of transformers in two threads at once fail
        return _load_processor(str(model_name))


def resize_image(image: Image.Image, max_size: int) -> Image.Image:
    """Returns the image with its longest side at most ``max_size`` pixels, with the same aspect
    ratio."""
    if max_size < 1:
        raise ConfigurationError(
            f"max_size: got {max_size}, expected the longest side in pixels, at least 1"
        )
    # Do not enlarge smaller images, which would add no detail.
    longest = max(image.size)
    if longest <= max_size:
        return image
    # At least one pixel, for images that are very long and narrow.
    width, height = (max(1, round(side * max_size / longest)) for side in image.size)
    return image.resize((width, height), pillow().Resampling.LANCZOS)


def image_to_data_uri(image: ImageSource) -> str:
    """Returns the image as ``data:image/…;base64,…``; files keep their bytes, Pillow images become
    PNG. Raises DataFormatError if it is not an image, or is a network URL."""
    opened, data = open_image(image)
    kind = opened.format if data is not None and opened.format else "PNG"
    data = png_bytes(opened) if data is None else data
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode('ascii')}"


def thumbnail_uri(image: Any) -> str:
    """Returns a small copy of an image as a data URI for pages, "" for what cannot be read.

    ``image`` is an image of a message, or a chunk of the SDK.
    """
    try:
        opened = rgb_image(open_image(getattr(image, "data", None) or image)[0])
    except (DataFormatError, ConfigurationError):
        return ""
    buffer = io.BytesIO()
    resize_image(opened, _THUMBNAIL_SIDE).save(buffer, format="JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def open_image(image: ImageSource) -> tuple[Image.Image, bytes | None]:
    """Returns the image, fully read, and its encoded bytes; None for a Pillow image.

    Raises DataFormatError if it is not an image, or is a network URL.
    """
    library = pillow()
    if isinstance(image, library.Image):
        return _loaded(cast("Image.Image", image)), None
    if not isinstance(image, (bytes, str, os.PathLike)):
        raise DataFormatError(
            f"image: got {type(image).__name__}, expected a Pillow image, the bytes of a file, a "
            "data URI, a file:// URI or the path of a file"
        )
    data = image if isinstance(image, bytes) else read_media(os.fspath(image))
    return _opened(data, f"image: {source_name(image)}"), data


def decode_image(data: bytes, where: str = "image") -> Image.Image:
    """Returns the pixels of an encoded image (PNG, JPEG, WebP, GIF or BMP); see :func:`rgb_image`.

    Raises DataFormatError, which begins with ``where``, for other data, for damaged files, and for
    more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``, before memory is allocated for them.
    """
    image = _opened(data, where)
    try:
        return rgb_image(image)
    except DataFormatError as error:
        raise DataFormatError(f"{where}: {error}") from error


def rgb_image(image: Image.Image) -> Image.Image:
    """Returns the image as a model sees it; the image itself if it is like that already.

    Upright by its EXIF orientation, 8 bits per colour (the high byte of 16), transparent parts on
    white as transformers' ``convert_to_rgb`` paints them, of an animation the first frame. Raises
    DataFormatError for pixels of an unknown range (modes I and F).
    """
    library = pillow()
    if _orientation(image) in range(2, 9):  # a copy, so only if need be
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image)
    key = image.info.get("transparency")
    # Pillow's own conversion of 16 bits cuts everything above 255 to white.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        values = np.asarray(image)
        gray = np.where(values == key, 255, values >> 8).astype(np.uint8)
        return library.fromarray(gray).convert("RGB")
    if image.mode in ("I", "F", "LAB"):
        raise DataFormatError(
            f"image: got pixels of Pillow's mode {image.mode}, expected 8 or 16 bits per colour; "
            "scale them to 0 … 255 and convert the image to RGB"
        )
    if key is not None or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        image = image.convert("RGBA")
        white = library.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(0x0112)
    except Exception:  # damaged EXIF data, without which browsers show the image as it is stored
        return None


def _loaded(image: Image.Image) -> Image.Image:
    """Returns a Pillow image, whose file may not have been read yet; raises DataFormatError."""
    try:
        image.load()
    except Exception as error:  # readers may raise anything on damaged files
        name = getattr(image, "filename", "") or f"of {image.width} x {image.height} pixels"
        image.close()  # or else Pillow returns damaged pixels at the next attempt
        raise DataFormatError(
            f"image: the Pillow image {name} cannot be read: {error}; expected a whole file that "
            "is still open"
        ) from error
    if 0 in image.size:
        raise DataFormatError(
            f"image: has {image.width} x {image.height} pixels, expected at least 1 x 1"
        )
    return image


def _opened(data: bytes, where: str) -> Image.Image:
    """Returns the image with its pixels read; raises DataFormatError."""
    library = pillow()
    # A small JPEG file can have thousands of passes over all its pixels; cameras write about ten.
    if data.startswith(b"\xff\xd8") and (scans := data.count(b"\xff\xda")) > _MOST_SCANS:
        raise DataFormatError(
            f"{where} has {scans} scans, expected at most {_MOST_SCANS}; save it again as PNG"
        )
    try:
        opened = _with_header(data, library)
        width, height = opened.size
        limit = library.MAX_IMAGE_PIXELS
        if limit is not None and width * height > limit:
            raise DataFormatError(
                f"has {width} x {height} pixels, expected at most {limit} pixels "
                "(PIL.Image.MAX_IMAGE_PIXELS, on a server max_image_megapixels=); make it smaller"
            )
        if opened.format == "PNG" and "transparency" in opened.info:
            _scale_transparency(opened)
        # load() finds damaged data now, where the source is known.
        opened.load()
    except DataFormatError as error:
        raise DataFormatError(f"{where} {error}") from error
    except library.DecompressionBombError as error:
        raise DataFormatError(f"{where}: {error} Make the image smaller") from error
    except Exception as error:  # readers may raise anything on damaged files
        reason = f": {error}" if str(error) else ""
        raise DataFormatError(
            f"{where} cannot be read as an image{reason}; expected a whole PNG, JPEG, WebP, GIF or "
            "BMP file"
        ) from error
    return opened


def _with_header(data: bytes, library: Any) -> Any:
    """Returns the image with its header read, so that its size is known before memory is allocated.

    Raises errors of any type. ``Image.open`` would also warn of an image that is then refused, and
    a filter of warnings would hold for all threads.
    """
    library.preinit()
    for kind in _FORMATS:
        if kind not in library.OPEN:
            library.init()
        factory, accepts = library.OPEN[kind]
        if accepts(data[:16]) is True:  # a text if Pillow was built without the format
            return factory(io.BytesIO(data), "")
    raise ValueError


def _scale_transparency(image: Any) -> None:
    """Scales the transparent colour of a PNG file as Pillow scales the pixels; call before load."""
    raw = image.tile[0][3]
    if raw in ("L;2", "L;4"):
        image.info["transparency"] *= {"L;2": 85, "L;4": 17}[raw]
    elif raw == "RGB;16B":  # Pillow drops the low bytes, by which colours may differ
        raise DataFormatError(
            "got 16-bit RGB with a transparent colour, expected 8 bits or an alpha channel"
        )


def png_bytes(image: Image.Image) -> bytes:
    """Returns the image as a PNG file; raises DataFormatError for modes that PNG does not have."""
    buffer = io.BytesIO()
    try:
        # A photo takes a third of the time of the default level, and a tenth more bytes.
        image.save(buffer, format="PNG", compress_level=1)
    except OSError as error:
        raise DataFormatError(f"image: {error}; convert it to RGB") from error
    return buffer.getvalue()


def pillow() -> Any:
    """Returns the module ``PIL.Image``; the error for a missing Pillow explains how to install
    it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigurationError(
            "images: need Pillow, which is not installed; run: pip install pillow"
        ) from error
    return Image


def read_media(source: str, kind: Literal["image", "audio"] = "image") -> bytes:
    """Returns the bytes of a local file, a ``file://`` URI or a data URI.

    Raises DataFormatError, which begins with ``kind``, if they cannot be read, and for other URLs.
    """
    if source.startswith("data:"):
        found = _DATA_URI.fullmatch(source)
        if not found or found["kind"] != kind:
            example = {"image": "image/png", "audio": "audio/wav"}[kind]
            raise DataFormatError(
                f"{kind}: got {source_name(source)}, expected a data URI such as "
                f"'data:{example};base64,…'"
            )
        if "base64" not in found["options"].split(";"):
            return unquote_to_bytes(found["data"])
        try:
            # Remove white space, since long data URIs may be wrapped.
            return base64.b64decode("".join(found["data"].split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataFormatError(
                f"{kind}: {source_name(source)} is not valid base64: {error}"
            ) from error
    if _REMOTE.match(source):
        raise DataFormatError(
            f"{kind}: got {source_name(source)}, expected a local file or a data URI: this package "
            f"does not fetch remote {kind} URLs; download it first and give its path"
        )
    # A file:// URI may have escaped characters, and a drive letter on Windows.
    local = url2pathname(urlsplit(source).path) if source.startswith("file:") else source
    try:
        return read_file(Path(local).expanduser(), _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise DataFormatError(
            f"{kind}: {source_name(source)} cannot be opened as a file: {error}; expected the path "
            f"of a file, or a data URI that begins with 'data:{kind}/'"
        ) from error


def read_file(path: Path, most: int) -> bytes:
    """Returns the bytes of a regular file of at most ``most`` bytes; raises OSError for others."""
    found = path.stat()  # before it is opened, which waits for the writer of a pipe
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is a folder, a device or a pipe")
    if found.st_size > most:
        raise OSError(f"it has {found.st_size >> 20} MiB, more than the limit of {most >> 20}")
    with path.open("rb") as opened:
        return opened.read(found.st_size)


def source_name(image: Any) -> str:
    """Returns how errors name an image: its path or address, without the content of a data URI."""
    if isinstance(image, bytes):
        return f"{len(image)} bytes"
    text, end = repr(image), 80
    if isinstance(image, str) and image.startswith("data:"):
        end = min(end, text.find(",") + 1 or end)
    return text if len(text) <= 100 else f"{text[:end]}… ({len(text)} characters)"


def _load_processor(name: str) -> Any:
    from tinker_cookbook.engine.model.resolve import base_name, resolve_model

    # Before transformers, so that the error for a missing Pillow explains how to install it.
    pillow()
    from transformers.models.auto import image_processing_auto

    auto = image_processing_auto.AutoImageProcessor
    source = base_name(name).strip()
    local = Path(source).expanduser()
    trusts_code = os.environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true", "yes")
    # Two parts without a folder of that name are a Hub name.
    if source.count("/") == 1 and not source.startswith(("/", ".", "~")) and not local.is_dir():
        try:
            options: dict[str, Any] = {}
            if source in PINNED_REMOTE_CODE:
                options = {"trust_remote_code": True, "revision": PINNED_REMOTE_CODE[source]}
            elif trusts_code:
                options = {"trust_remote_code": True}
            return _with_tokens(auto.from_pretrained(source, **options), source)
        except Exception as error:  # below: other sources, and errors that name the next step
            logger.debug("%s: %s", source, error)
    folder = local if source and local.is_dir() else resolve_model(source, need="tokenizer").folder
    if not any((folder / file).is_file() for file in _CONFIG_FILES):
        raise ModelNotFoundError(
            f"model_name: {name!r} has no image processor: {folder} lacks {_CONFIG_FILES[0]}; "
            "expected a model that takes images. If this one does, its copy here is incomplete: "
            f"fetch that file too (hf download {source} {_CONFIG_FILES[0]})"
        )
    # Files in a folder have no revision, so their code runs only if the user allows it.
    try:
        processor = auto.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trusts_code
        )
        return _with_tokens(processor, str(folder))
    except Exception as error:  # readers may raise anything on damaged files
        raise ConfigurationError(
            f"model_name: the image processor in {folder} cannot be loaded: {error}; expected "
            "files that transformers' AutoImageProcessor reads (set HF_TRUST_REMOTE_CODE=1 if it "
            "needs custom code)"
        ) from error


def _with_tokens(processor: Any, source: str) -> Any:
    """Adds ``image_seq_len``, the tokens of an image or of a tile, where only the model's config
    has it (Idefics3, SmolVLM, Gemma 3)."""
    if type(processor).__name__.startswith(("Idefics3", "SmolVLM", "Gemma3")):
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(source)
        tokens = getattr(config, "mm_tokens_per_image", None)
        if tokens is None:
            side = config.vision_config.image_size // config.vision_config.patch_size
            tokens = side**2 // config.scale_factor**2
        processor.image_seq_len = tokens
    return processor
