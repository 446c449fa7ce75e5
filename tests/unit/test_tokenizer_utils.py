"""Tokenizers by name: cache, registry, the check against tokenizer.json, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer

from tinker_cookbook import tokenizer_utils
from tinker_cookbook.exceptions import ConfigurationError, ModelNotFoundError
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No hub, and an empty hub cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def copy_of(folder, target, **changes):
    """A copy of a tokenizer folder with other values in its tokenizer_config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return str(target)


def test_registry():
    made = []

    class Custom:
        pass

    def factory():
        made.append(1)
        return Custom()

    tokenizer_utils.register_tokenizer("my/tokenizer", factory)
    try:
        assert tokenizer_utils.is_tokenizer_registered("my/tokenizer")
        assert tokenizer_utils.get_registered_tokenizer_names() == ["my/tokenizer"]
        first = get_tokenizer("my/tokenizer")
        assert isinstance(first, Custom)
        assert get_tokenizer("my/tokenizer") is first
        assert made == [1]
        tokenizer_utils.register_tokenizer("my/tokenizer", factory)
        assert get_tokenizer("my/tokenizer") is not first
    finally:
        assert tokenizer_utils.unregister_tokenizer("my/tokenizer")
    assert not tokenizer_utils.unregister_tokenizer("my/tokenizer")


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "llama3", "deepseek_v3"])
def test_ids_are_those_of_the_file(tokenizer_folder, family):
    folder = tokenizer_folder(family)
    raw = RawTokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    for text in ["Hello  world\n\n 123", "def f(x):\n\treturn x", "naïve 你好 🙂", "<|im_end|>"]:
        tokens = tokenizer_utils.encode_without_special_tokens(get_tokenizer(folder), text)
        assert tokens == raw.encode(text, add_special_tokens=False).ids
        assert tokenizer_utils.decode_exactly(get_tokenizer(folder), tokens) == text


def test_wrong_class_in_the_config_is_repaired(tokenizer_folder, tmp_path, caplog):
    """transformers would rebuild SmolLM2's tokenizer as CodeLlama's, with other ids."""
    from transformers import AutoTokenizer

    right = tokenizer_folder("smollm2")
    wrong = copy_of(right, tmp_path / "wrong", tokenizer_class="CodeLlamaTokenizer")
    text = "Hello  world, 12345!\n"
    expected = get_tokenizer(right).encode(text, add_special_tokens=False)
    assert AutoTokenizer.from_pretrained(wrong).encode(text, add_special_tokens=False) != expected
    assert get_tokenizer(wrong).encode(text, add_special_tokens=False) == expected
    assert "gives other ids than its tokenizer.json" in caplog.text


def test_tokenizer_that_cannot_be_repaired(stories_model, monkeypatch):
    monkeypatch.setattr(tokenizer_utils, "_raw_ids", lambda folder: [1, 2, 3])
    with pytest.raises(ConfigurationError, match=r"gives other ids than its tokenizer\.json"):
        get_tokenizer(stories_model + "/")


def test_hub_name_offline(offline):
    with pytest.raises(ModelNotFoundError, match="some/model") as caught:
        get_tokenizer("some/model")
    assert "HF_TOKEN" in str(caught.value)
    assert "folder in transformers format" in str(caught.value)


def hub_copy(folder, cache, name):
    """Lays a tokenizer into a hub cache as the hub client does."""
    repo = cache / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)


def test_gated_llama_takes_the_ungated_tokenizer(offline, stories_model):
    with pytest.raises(ModelNotFoundError, match="gated, and its tokenizer's ungated copy"):
        get_tokenizer("meta-llama/Llama-3.2-1B")
    hub_copy(
        stories_model, offline / "hub", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
    )
    assert get_tokenizer("meta-llama/Llama-3.2-1B").vocab_size == 512
