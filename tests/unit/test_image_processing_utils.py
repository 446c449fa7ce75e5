"""Images from files, data URIs and Pillow, and the processors that count their tokens."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.image_processing_utils import (
    PINNED_REMOTE_CODE,
    decode_image,
    get_image_processor,
    image_to_data_uri,
    open_image,
    rgb_image,
)

CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}


def saved(image, path, **options):
    image.save(path, **options)
    return path


@pytest.fixture
def picture():
    return Image.linear_gradient("L").resize((40, 20)).convert("RGB")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    get_image_processor.cache_clear()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("https://example.com/a.png", r"does not fetch remote image URLs; download it first"),
        ("s3://bucket/a.png", r"does not fetch remote image"),
        ("no/such/file.png", r"'no/such/file.png' cannot be opened as a file"),
        ("A" * 5000, r"\(5002 characters\) cannot be opened as a file"),
        ("data:text/plain,hi", r"expected a data URI such as 'data:image/png"),
        ("data:image/png;base64,&&&", r"not valid base64"),
        ("data:image/png;base64,aGk=", r"cannot be read as an image"),
        ("data:image/png;base64," + "aGkh" * 40, r"image: 'data:image/png;base64,… \(184 char"),
        (b"\x89PNG", r"cannot be read as an image"),
        (5, r"got int, expected a Pillow image"),
    ],
)
def test_invalid_local_images_are_refused(source, error):
    with pytest.raises(DataFormatError, match=error):
        image_to_data_uri(source)


def test_only_regular_files_of_limited_size_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.png").write_bytes(bytes(2 << 20))
    (tmp_path / "link.png").symlink_to("/dev/zero")
    monkeypatch.setattr("tinker_cookbook.image_processing_utils._MOST_BYTES", 1 << 20)
    for file, said in {
        "pipe": "it is a folder, a device or a pipe",
        "link.png": "it is a folder, a device or a pipe",
        ".": "it is a folder, a device or a pipe",
        "large.png": "it has 2 MiB, more than the limit of 1",
        "no.png": "No such file",
    }.items():
        for source in (tmp_path / file, (tmp_path / file).as_uri()):
            with pytest.raises(DataFormatError, match=f"cannot be opened as a file: .*{said}"):
                open_image(source)


@pytest.mark.parametrize(
    ("kind", "processor", "config", "tokens"),
    [
        (
            "smolvlm",
            "SmolVLMImageProcessor",
            {"scale_factor": 4, "vision_config": {"image_size": 512, "patch_size": 16}},
            64,
        ),
        (
            "idefics3",
            "Idefics3ImageProcessor",
            {"vision_config": {"image_size": 364, "patch_size": 14}},
            169,
        ),
        ("gemma3", "Gemma3ImageProcessor", {"mm_tokens_per_image": 256}, 256),
    ],
)
def test_a_models_config_has_the_tokens_of_a_tile(tmp_path, kind, processor, config, tokens):
    for name, values in (
        ("preprocessor_config.json", {"image_processor_type": processor}),
        ("config.json", {"model_type": kind, **config}),
    ):
        (tmp_path / name).write_text(json.dumps(values))
    assert get_image_processor(str(tmp_path)).image_seq_len == tokens


def test_code_of_a_model_needs_leave(tmp_path, monkeypatch):
    code = (
        "class Own:\n    merge_size = 1\n\n    @classmethod\n"
        "    def from_pretrained(cls, *args, **kwargs):\n        return cls()\n\n    @classmethod\n"
        "    def register_for_auto_class(cls, *args):\n        pass\n"
    )
    (tmp_path / "own.py").write_text(code)
    config = {"auto_map": {"AutoImageProcessor": "own.Own"}, "image_processor_type": "Own"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    with pytest.raises(ConfigurationError, match="HF_TRUST_REMOTE_CODE=1"):
        get_image_processor(str(tmp_path))
    monkeypatch.setenv("HF_TRUST_REMOTE_CODE", "1")
    assert type(get_image_processor(str(tmp_path))).__name__ == "Own"


@pytest.mark.parametrize(
    ("name", "trust", "options"),
    [
        ("some-org/some-model", "", {}),
        ("some-org/some-model:peft:1", "yes", {"trust_remote_code": True}),
        *(
            (name, "", {"trust_remote_code": True, "revision": revision})
            for name, revision in PINNED_REMOTE_CODE.items()
        ),
    ],
)
def test_hub_names_go_to_transformers_as_they_are(monkeypatch, name, trust, options):
    monkeypatch.setenv("HF_TRUST_REMOTE_CODE", trust)
    calls = []
    place = "transformers.models.auto.image_processing_auto.AutoImageProcessor.from_pretrained"
    monkeypatch.setattr(place, lambda *args, **kwargs: calls.append((args, kwargs)))
    get_image_processor(name)
    get_image_processor.cache_clear()
    assert calls == [((name.partition(":")[0],), options)]


def png(size, depth, color, body, *chunks):
    """A PNG file by the specification, without Pillow; ``body`` are the rows before compression."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", *size, depth, color, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(body, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(itertools.starmap(chunk, parts))


def on_white(colors, alpha):
    return np.round(colors * (alpha / 255) + 255 * (1 - alpha / 255)).astype(np.uint8)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(
    ("color", "depth"),
    [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (2, 8), (2, 16), (3, 1), (3, 4), (3, 8), (4, 8),
     (4, 16), (6, 8), (6, 16)],
)  # fmt: skip
def test_every_kind_of_png_has_the_pixels_of_the_specification(color, depth, keyed):
    """Gray, RGB, palette, gray with alpha, RGBA; ``keyed``: transparent colours."""
    rng, channels = np.random.default_rng(depth), {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    values = rng.integers(0, 2**depth, (5, 8, channels))
    bits = (values.reshape(5, -1, 1) >> np.arange(depth)[::-1]) & 1
    rows = np.packbits(bits.reshape(5, -1).astype(np.uint8), axis=1)
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    eight = values >> 8 if depth == 16 else values * 255 // (2**depth - 1)
    chunks, key = [], values[1, 2]
    if color == 3:
        palette = rng.integers(0, 256, (2**depth, 3)).astype(np.uint8)
        alphas = rng.integers(0, 256, 2**depth).astype(np.uint8)
        chunks = [(b"PLTE", palette.tobytes())] + [(b"tRNS", alphas.tobytes())] * keyed
        expected = palette[values[..., 0]]
        if keyed:
            expected = on_white(expected, alphas[values])
    elif color in (4, 6):
        expected = on_white(eight[..., :-1], eight[..., -1:])
    else:
        chunks = [(b"tRNS", struct.pack(f">{channels}H", *key))] * keyed
        same = (values == key).all(-1, keepdims=True) & keyed
        expected = np.where(same, 255, eight)
    if (color, depth, keyed) == (2, 16, True):
        with pytest.raises(DataFormatError, match="got 16-bit RGB with a transparent colour"):
            decode_image(png((8, 5), depth, color, body, *chunks))
        return
    found = decode_image(png((8, 5), depth, color, body, *chunks))
    np.testing.assert_array_equal(np.asarray(found), np.broadcast_to(expected, (5, 8, 3)))


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_every_orientation_is_upright_as_for_transformers(picture, kind):
    from transformers.image_utils import load_image

    upright = [lambda a: a, np.fliplr, lambda a: np.rot90(a, 2), np.flipud,
               lambda a: a.swapaxes(0, 1), lambda a: np.rot90(a, -1),
               lambda a: np.rot90(a.swapaxes(0, 1), 2), np.rot90]  # fmt: skip
    for orientation, turn in enumerate(upright, 1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(picture, kind, exif=exif)
        found = np.asarray(decode_image(data))
        np.testing.assert_array_equal(found, turn(np.asarray(Image.open(io.BytesIO(data)))))
        loaded = load_image(base64.b64encode(data).decode())
        np.testing.assert_array_equal(found, np.asarray(loaded))
        # Damaged EXIF data are ignored, as browsers do.
        if kind == "JPEG":
            assert decode_image(data.replace(b"MM\0*", b"??\0*")).size == picture.size


def halves():
    image = Image.effect_noise((64, 64), 50).convert("RGB")
    whole = {kind: encoded(image, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
    cut = {f"half a {kind}": data[: len(data) // 2] for kind, data in whole.items()}
    return {
        **{kind: data for kind, data in cut.items() if "TIFF" not in kind},
        "TIFF": whole["TIFF"],
    }


def lossless_webp(side):
    data = bytearray(encoded(Image.new("RGB", (8, 8)), "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    (bits,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at, bits >> 28 << 28 | (side - 1) << 14 | (side - 1))
    return bytes(data)


def jpeg(side, scans=0):
    """A JPEG with another size in its header, or with its only scan repeated."""
    data = bytearray(encoded(Image.new("L", (8, 8)), "JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, side, side)
    return bytes(data[:-2]) + bytes(data[data.index(b"\xff\xda") : -2]) * scans + b"\xff\xd9"


def bombs():
    gif, bmp = bytearray(encoded(Image.new("L", (8, 8)), "GIF")), bytearray(54)
    struct.pack_into("<HH", gif, 6, 60_000, 60_000)
    struct.pack_into("<2sIIIIiiHH", bmp, 0, b"BM", 54, 0, 54, 40, 30_000, 30_000, 1, 24)
    # Rows of one block each, which is repeated.
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    row = packed.compress(bytes(30_001)) + packed.flush(zlib.Z_FULL_FLUSH)
    body = b"\x78\xda" + row * 30_000
    large = png((30_000, 30_000), 8, 0, b"").replace(zlib.compress(b"", 9), body)
    assert len(large) > 1_000_000
    return {"PNG": large, "PNG of 90 million": png((10_000, 9_000), 8, 2, b""), "GIF": bytes(gif),
            "BMP": bytes(bmp), "WEBP": lossless_webp(16_383), "JPEG": jpeg(65_500)}  # fmt: skip


def test_truncated_images_are_refused():
    texts = ("", "<svg xmlns='http://www.w3.org/2000/svg'/>", "<!DOCTYPE html><p>", "%PDF-1.7")
    for data in [*(text.encode() for text in texts), b"%!PS-Adobe-3.0", *halves().values()]:
        said = r"^datum 3: images\[0\] cannot be read as an image.*expected"
        with pytest.raises(DataFormatError, match=said):
            decode_image(data, "datum 3: images[0]")
    with pytest.raises(DataFormatError, match="has 3001 scans, expected at most 100"):
        decode_image(jpeg(64, scans=3000))
    for mode in ("F", "I"):
        with pytest.raises(DataFormatError, match=f"mode {mode}, expected 8 or 16 bits"):
            rgb_image(Image.new(mode, (2, 2)))


def test_too_many_pixels_are_refused_before_memory_is_taken(monkeypatch):
    def peak():
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    files = bombs()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = peak()
    except OSError:
        pytest.skip("needs Linux")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for data in files.values():
            with pytest.raises(DataFormatError, match=r"pixels.*make|Make .*smaller"):
                decode_image(data)
    assert not warned
    assert peak() - before < 32
    # Eight bytes per pixel: Pillow has four, before and after the conversion.
    data = encoded(Image.new("RGBA", (5_000, 4_000)), "PNG", compress_level=1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000 * 4_000)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    decode_image(data)
    assert peak() - before < 220
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000 * 4_000 - 1)
    with pytest.raises(DataFormatError, match="has 5000 x 4000 pixels, expected at most 19999999"):
        decode_image(data)
