"""Tokenizers by model name, loaded once and checked.

``get_tokenizer`` accepts a local folder, a Hub name that is cached or can be downloaded, or a name
registered with ``register_tokenizer``. The package tml-renderers has the tokenizer of Inkling, and
those of other hosted models, which are used where the Hub cannot be reached.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from tinker_cookbook._process import importing_libraries
from tinker_cookbook.exceptions import ConfigurationError, ModelNotFoundError, install_command
from tinker_cookbook.tml_tokenizers import SupportsTmlTokenizer as SupportsTmlTokenizer
from tinker_cookbook.tml_tokenizers import TmlHubTokenizer, TmlRenderersTokenizerAdapter
from tinker_cookbook.tml_tokenizers import TmlTokenizer as TmlTokenizer

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase
else:
    Tokenizer = Any

logger = logging.getLogger(__name__)

TokenizerFactory: TypeAlias = Callable[[], "Tokenizer"]

TmlTokenizerFamily: TypeAlias = Literal["o200k_base_chat", "h200k_base_chat", "kimi_k3"]
# Models that only tml-renderers tokenizes, by the start of the name; the longest comes first.
_TML_FAMILIES: dict[str, TmlTokenizerFamily] = {
    "thinkingmachines/Inkling-2-Small": "h200k_base_chat",
    "thinkingmachines/Inkling": "o200k_base_chat",
    "moonshotai/Kimi-K3.1-Pro": "kimi_k3",
}
_TML_CLASSES: dict[TmlTokenizerFamily, str] = {
    "h200k_base_chat": "H200kBaseChatTokenizer",
    "o200k_base_chat": "O200kBaseChatTokenizer",
    "kimi_k3": "KimiK3Tokenizer",
}
# Models of the Hub whose tokenizer tml-renderers has as well.
_TML_COPIES = {
    r"deepseek-ai/DeepSeek-V3\.1": "DeepSeekV31Tokenizer",
    r"deepseek-ai/DeepSeek-V4\.1-Flash(-1017)?": "DeepSeekV41Tokenizer",
    r"zai-org/GLM-5\.3(-Flash)?": "GlmTokenizer",
    r"moonshotai/Kimi-K2-Thinking": "KimiK2ThinkingTokenizer",
    r"moonshotai/Kimi-K2\.5": "KimiK25Tokenizer",
    r"moonshotai/Kimi-K2\.6": "KimiK26Tokenizer",
    r"nvidia/NVIDIA-Nemotron-3-.*": "Nemotron3Tokenizer",
    r"openai/gpt-oss-.*": "HarmonyTokenizer",
    r"Qwen/Qwen3-(VL-)?\d.*": "Qwen3Tokenizer",
    r"Qwen/Qwen3\.[58]-.*": "Qwen35Tokenizer",
}


class _PackageNotFoundError(ConfigurationError, ModuleNotFoundError):
    """An optional package is not installed."""


@runtime_checkable
class SupportsEncodeOrdinary(Protocol):
    """A tokenizer with a method that encodes text without special tokens."""

    def encode_ordinary(self, text: str) -> Sequence[int]:
        """Returns the tokens of ``text``."""
        ...


def ensure_tml_renderers_importable() -> None:
    """Makes ``tml_renderers`` importable, also from the folder ``TML_RENDERERS_SOURCE_DIR``.

    Raises a ConfigurationError that is also a ModuleNotFoundError where it cannot be found.
    """
    folder = os.environ.get("TML_RENDERERS_SOURCE_DIR")
    for path in ("", folder and str(Path(folder).expanduser())):
        if path is None:
            continue
        if added := bool(path) and path not in sys.path:
            sys.path.insert(0, path)
        if importlib.util.find_spec("tml_renderers") is not None:
            return
        if added:
            sys.path.remove(path)
    raise _PackageNotFoundError(
        f"the package tml-renderers is not installed: {install_command('tml')}"
    )


def _tml_family(model_name: str) -> TmlTokenizerFamily | None:
    name = str(model_name)
    return next((f for start, f in _TML_FAMILIES.items() if name.startswith(start)), None)


def is_tml_renderers_model(model_name: str) -> bool:
    """Returns whether the tml-renderers package tokenizes this model, not transformers."""
    return _tml_family(model_name) is not None


def _tml_tokenizer(model_name: str, class_name: str) -> TmlTokenizer:
    ensure_tml_renderers_importable()
    tokenizers = importlib.import_module("tml_renderers.tokenizers")
    found = getattr(tokenizers, class_name, None)
    if found is None:
        raise ModelNotFoundError(
            f"model_name: got {model_name!r}, whose tokenizer {class_name} the installed "
            "tml-renderers does not have; expected version 0.4.1 or later: "
            "pip install -U tml-renderers (PyPI's newest was 0.2.1 in November 2026)"
        )
    return found()


# Llama 3 repositories are gated; their tokenizer is published without a gate under this name.
_LLAMA3_PREFIXES = ("meta-llama/Llama-3", "meta-llama/Meta-Llama-3")
_LLAMA3_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"

# Digits, repeated spaces, line breaks, accents, scripts and code, which rebuilt tokenizers may
# split differently.
_PROBE = "Hello  world, it's 12345.67!\n\n\tif x == 1:\r\n    naïve café — 你好 Привет 🙂"

_lock = threading.RLock()
_factories: dict[str, TokenizerFactory] = {}
_loaded: dict[str, Tokenizer] = {}


def register_tokenizer(name: str, factory: TokenizerFactory) -> None:
    """Makes ``get_tokenizer(name)`` call ``factory()`` (once); replaces an earlier registration."""
    with _lock:
        _factories[name] = factory
        # Drop the cached tokenizer of an earlier registration.
        _loaded.pop(name, None)


def unregister_tokenizer(name: str) -> bool:
    """Removes a registered tokenizer; returns whether there was one."""
    with _lock:
        _loaded.pop(name, None)
        return _factories.pop(name, None) is not None


def is_tokenizer_registered(name: str) -> bool:
    """Returns whether ``register_tokenizer`` was called for this name."""
    return name in _factories


def get_registered_tokenizer_names() -> list[str]:
    """Returns the registered names, sorted."""
    return sorted(_factories)


def get_tokenizer(model_name: str) -> Tokenizer:
    """Returns the tokenizer of a model, loaded once per process.

    ``model_name`` is a registered name, a folder in transformers format, or a Hub name; a suffix
    ``:peft:…`` is ignored.

    Raises:
        ModelNotFoundError: There is no such tokenizer.
        ConfigurationError: The loaded tokenizer disagrees with its own ``tokenizer.json``.
    """
    name = str(model_name)
    with _lock:
        if name not in _loaded:
            tokenizer = _factories[name]() if name in _factories else _load(name)
            tokenizer.cookbook_name = name  # a pickled renderer loads it by this name
            _loaded[name] = tokenizer
        return _loaded[name]


def tokenizer_name(tokenizer: Tokenizer) -> str | None:
    """Returns the name with which ``get_tokenizer`` returns this tokenizer, or None."""
    return getattr(tokenizer, "cookbook_name", None) or getattr(tokenizer, "name_or_path", None)


def encode_without_special_tokens(
    tokenizer: Tokenizer | SupportsEncodeOrdinary, text: str
) -> list[int]:
    """Returns the tokens of ``text`` without added BOS or EOS.

    Names of special tokens in the text are encoded as these tokens, unless the tokenizer has a
    method ``encode_ordinary``, which is then used.
    """
    backend = _plain_backend(tokenizer)
    if backend is None:
        if isinstance(tokenizer, SupportsEncodeOrdinary):
            return list(tokenizer.encode_ordinary(text))
        return tokenizer.encode(text, add_special_tokens=False)
    # The same call as in transformers, without checks and offsets, which is 1.5 times as fast.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def encode_without_added_tokens(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Returns the tokens of ``text`` with names of special tokens as plain text.

    None if the tokenizer does not support it.
    """
    if isinstance(tokenizer, SupportsTmlTokenizer):
        return list(tokenizer.tml_tokenizer.encode_ordinary(text))
    backend = _plain_backend(tokenizer)
    if backend is None or backend.pre_tokenizer is None:
        return None
    # Run the backend's steps after its search for added tokens. Setting its flag
    # `encode_special_tokens` for one call would race with other threads that encode.
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    model = backend.model
    words = backend.pre_tokenizer.pre_tokenize_str(text)
    return [token.id for word, _ in words for token in model.tokenize(word)]


def _plain_backend(tokenizer: Tokenizer | SupportsEncodeOrdinary) -> Any:
    """Returns the ``tokenizers.Tokenizer`` if it does all the encoding without truncation,
    otherwise None."""
    if not _encodes_by_backend(type(tokenizer)):
        return None
    backend: Any = cast(Any, tokenizer)._tokenizer
    # With such settings, the tokenizer truncates, pads or treats special tokens differently.
    changed = backend.truncation or backend.padding or backend.encode_special_tokens
    return None if changed else backend


@cache
def _encodes_by_backend(kind: type) -> bool:
    from transformers import PreTrainedTokenizerFast

    # A subclass that overrides one of these methods may add steps.
    return issubclass(kind, PreTrainedTokenizerFast) and all(
        getattr(kind, method) is getattr(PreTrainedTokenizerFast, method)
        for method in ("encode", "_encode_plus", "__call__")
    )


def decode_exactly(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Returns the text of ``tokens`` with the names of special tokens and all spaces.

    Some tokenizer configs set ``clean_up_tokenization_spaces``, which changes ``Hi !`` to ``Hi!``.
    """
    text = tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return cast(str, text)


def special_id(tokenizer: Tokenizer, which: Literal["bos", "eos"]) -> int | None:
    """Returns the id of the BOS or EOS token, None if the tokenizer has none."""
    return cast("int | None", getattr(tokenizer, f"{which}_token_id"))


def _load(name: str) -> Tokenizer:
    from tinker_cookbook.engine.model.resolve import base_name, resolve_model

    source = base_name(name).strip()
    if family := _tml_family(source):
        adapter = TmlRenderersTokenizerAdapter(name, _tml_tokenizer(source, _TML_CLASSES[family]))
        return cast("Tokenizer", adapter)
    if not source.startswith(_LLAMA3_PREFIXES) or Path(source).is_dir():
        try:
            return _load_checked(resolve_model(source, need="tokenizer").folder)
        except ModelNotFoundError as error:
            return _tml_copy(source, error)
    try:
        # Only a local copy, because a download from the gated repository needs a token.
        found = resolve_model(source, allow_download=False, need="tokenizer")
    except ModelNotFoundError as not_here:
        try:
            found = resolve_model(_LLAMA3_TOKENIZER, need="tokenizer")
        except ModelNotFoundError as error:
            raise ModelNotFoundError(
                f"model_name: no tokenizer found for {name!r}: the repository is gated, and its "
                f"tokenizer's ungated copy {_LLAMA3_TOKENIZER!r} cannot be reached either; "
                "give a local folder in transformers format, or set HF_TOKEN and go online\n"
                f"{not_here}\n{error}"
            ) from error
    return _load_checked(found.folder)


def _tml_copy(model_name: str, not_here: ModelNotFoundError) -> Tokenizer:
    """Returns tml-renderers' copy of a tokenizer that cannot be loaded from the Hub."""
    copies = (kind for name, kind in _TML_COPIES.items() if re.fullmatch(name, model_name))
    # A base model of a family may have another EOS token.
    kind = None if "Base" in model_name else next(copies, None)
    if kind is None:
        raise not_here
    try:
        # OpenAI's own EOS token ends documents; an answer ends with this one.
        eos = "return" if kind == "HarmonyTokenizer" else ""
        copy = TmlHubTokenizer(model_name, _tml_tokenizer(model_name, kind), eos)
    except _PackageNotFoundError as error:
        raise ModelNotFoundError(
            f"{not_here}\nThe package tml-renderers has this tokenizer: {install_command('tml')}"
        ) from error
    logger.warning(
        "%s: neither a copy on this machine nor the Hub could be reached; its tokenizer was taken "
        "from the package tml-renderers, which has no chat template",
        model_name,
    )
    return cast("Tokenizer", copy)


def _load_checked(folder: Path) -> Tokenizer:
    """Loads a tokenizer and compares it with its own ``tokenizer.json``.

    transformers 5 rebuilds a tokenizer from the class named in its config. If the file was written
    for another class, ids are silently wrong, so the file is authoritative.
    """
    with importing_libraries():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"local_files_only": True}
    # Code from a repository runs only if the user allows it.
    if os.environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true", "yes"):
        options["trust_remote_code"] = True
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
    except Exception as error:  # a parser may raise anything on damaged files
        raise ConfigurationError(
            f"model_name: the tokenizer in {folder} cannot be loaded: {error}; expected files that "
            "transformers' AutoTokenizer reads (set HF_TRUST_REMOTE_CODE=1 if it needs custom code)"
        ) from error
    # One text is enough: classes differ in pre-tokenization, and the text covers its cases.
    truth = _raw_ids(folder)
    if truth is None or encode_without_special_tokens(tokenizer, _PROBE) == truth:
        return tokenizer
    wrong = type(tokenizer).__name__
    # The generic class reads all steps from tokenizer.json, so its ids follow the file.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
    if encode_without_special_tokens(tokenizer, _PROBE) != truth:
        raise ConfigurationError(
            f"model_name: the tokenizer in {folder} gives other ids than its tokenizer.json, "
            f"as {wrong} and as PreTrainedTokenizerFast; expected the same: "
            "check that tokenizer.json and tokenizer_config.json belong together"
        )
    logger.warning(
        "%s: transformers loads this tokenizer as %s, which gives other ids than its "
        "tokenizer.json; loaded as PreTrainedTokenizerFast instead, with the file's ids",
        folder,
        wrong,
    )
    return tokenizer


def _raw_ids(folder: Path) -> list[int] | None:
    from tokenizers import Tokenizer as RawTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    return RawTokenizer.from_file(str(path)).encode(_PROBE, add_special_tokens=False).ids
