"""Images from files, data URIs and Pillow, and the processors that count their tokens."""

from __future__ import annotations

import base64
import builtins
import io
import json
import os

import pytest
from PIL import Image

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, ModelNotFoundError
from tinker_cookbook.image_processing_utils import (
    PINNED_REMOTE_CODE,
    get_image_processor,
    image_to_data_uri,
    open_image,
    resize_image,
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
    ("size", "limit", "expected"),
    [((40, 20), 10, (10, 5)), ((20, 40), 39, (20, 39)), ((1000, 1), 10, (10, 1))],
)
def test_resize_keeps_the_aspect(size, limit, expected):
    assert resize_image(Image.new("RGB", size), limit).size == expected


def test_resize_leaves_small_images_and_refuses_nonsense(picture):
    assert resize_image(picture, 40) is picture
    with pytest.raises(ConfigurationError, match="max_size: got 0, expected"):
        resize_image(picture, 0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_files_keep_their_bytes(picture, tmp_path, kind):
    path = saved(picture, tmp_path / "a b.img", format=kind)
    expected = f"data:image/{kind.lower()};base64,{base64.b64encode(path.read_bytes()).decode()}"
    for source in (path, str(path), path.as_uri(), expected):
        assert image_to_data_uri(source) == expected


def test_pillow_images_become_png(picture):
    opened, data = open_image(image_to_data_uri(picture))
    assert (opened.format, opened.tobytes()) == ("PNG", picture.tobytes())
    assert data is not None
    assert open_image(picture) == (picture, None)


def test_data_uris_without_base64_are_read(picture):
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    spelled = "".join(f"%{byte:02x}" for byte in buffer.getvalue())
    assert open_image(f"data:image/png,{spelled}")[0].tobytes() == picture.tobytes()


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
        (b"\x89PNG", r"got bytes, expected a Pillow image"),
    ],
)
def test_what_is_no_local_image_is_refused(source, error):
    with pytest.raises(DataFormatError, match=error):
        image_to_data_uri(source)


def test_a_cut_off_file_is_refused(picture, tmp_path):
    path = saved(picture, tmp_path / "a.jpg")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataFormatError, match="cannot be read as an image"):
        open_image(path)


def test_without_pillow_the_error_says_what_to_install(monkeypatch, picture):
    real = builtins.__import__

    def without(name, *rest):
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: image_to_data_uri(picture), lambda: get_image_processor("some/model")):
        with pytest.raises(ConfigurationError, match="pip install pillow"):
            call()


def test_models_of_tml_renderers_have_no_processor_of_transformers():
    assert get_image_processor("thinkingmachines/Inkling:peft:262144") is None


def test_processor_of_a_folder_is_loaded_once(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CONFIG))
    processor = get_image_processor(str(tmp_path))
    assert get_image_processor(str(tmp_path)) is processor
    assert (processor.patch_size, processor.merge_size) == (16, 2)
    assert processor.get_number_of_image_patches(256, 512, {}) == 16 * 32


def test_models_without_a_processor_are_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no image processor.*lacks preprocessor_config"):
        get_image_processor(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="neither an existing folder nor a Hub name"):
        get_image_processor(os.fspath(tmp_path / "no" / "such"))
    with pytest.raises(ModelNotFoundError, match="was not found"):
        get_image_processor("no-such/model:peft:1")
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        get_image_processor(str(tmp_path))


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
