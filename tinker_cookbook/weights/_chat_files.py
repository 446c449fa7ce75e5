"""Chat template and stops of the run's renderer, in the files of an export.

The base model's own template and stops may be others than those that the model was trained with:
a base model has none, and a run may choose another format.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from tinker_cookbook.engine.model.resolve import model_config
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.renderers.core.messages import ensure_list
from tinker_cookbook.renderers.template.text import argument
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer
from tinker_cookbook.weights._chat_format import chat_format, conversations, stop_texts
from tinker_cookbook.weights._source import Checkpoint

TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = (
    "tokenizer*", "tokenization_*.py", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.tiktoken", "tiktoken.model", "tekken.json", "chat_template.*", GENERATION,
    "*processor_config.json",  # of images, which AutoProcessor reads with the tokenizer
)  # fmt: skip
# Arguments by which the templates of model families choose the format of a renderer.
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"enable_thinking": False}, {"enable_thinking": True}, {"thinking": False}, {"thinking": True},
    {"reasoning_effort": "low"}, {"reasoning_effort": "medium"}, {"reasoning_effort": "high"},
    {"low_effort": True}, {"medium_effort": True}, {"preserve_thinking": True},
)  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """How prompts begin and answers end in an export."""

    template: str | None
    """Chat template in Jinja; None: no template gives the renderer's prompts."""
    own: bool = True
    """Whether the template is the base model's, unchanged."""
    stop_ids: list[int] = field(default_factory=list)
    """Tokens that end an answer, those of the renderer first."""
    stop_strings: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


def chat_of(checkpoint: Checkpoint) -> Chat:
    """Returns the chat format of the renderer that the run recorded; without one the base model's.

    The engine samples until one of the renderer's stops or the base model's own end of text.
    """
    folder, name = checkpoint.base_folder, checkpoint.metadata.get("renderer_name")
    tokenizer = get_tokenizer(str(folder))
    templates = _templates(tokenizer, folder)
    given, ends = next(iter(templates), None), _end_ids(folder)
    why = "the run recorded no renderer; set renderer_name= to write its template and stops"
    renderer = None
    if name is not None:
        try:
            renderer = get_renderer(name, tokenizer)
        except TinkerCookbookError as error:  # for example a renderer of another package
            why = f"the renderer {name} cannot be made ({error})"
    if name is None or renderer is None:
        return Chat(given, True, ends, [], {"chat template": f"the base model's: {why}"})
    template, exact = _best_template(renderer, name, templates, tokenizer)
    stops = renderer.get_stop_sequences()
    ids = [stop for stop in stops if isinstance(stop, int)]
    strings = [stop for stop in stops if isinstance(stop, str)]
    shown = ", ".join(
        json.dumps(text, ensure_ascii=False) for text in stop_texts(renderer, tokenizer)
    )
    if strings:
        shown += (
            "; generate() needs tokenizer=tokenizer for it, llama-server --reverse-prompt, and "
            "vLLM stop=[…] in each request"
        )
    facts = {
        "chat template": _described(name, template, exact, given),
        "answers end at": shown,
    }
    all_ids = list(dict.fromkeys([*ids, *ends]))
    return Chat(template, template == given, all_ids, strings, facts)


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copies the files of a base model's tokenizer, its templates and generation settings."""
    for pattern in _TOKENIZER_FILES:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, out / path.name)


def write_chat_files(chat: Chat, base_folder: Path, out: Path) -> None:
    """Changes the copied files of a base model: chat template, and the stops of ``generate``."""
    if not chat.own:
        for path in out.glob("chat_template.*"):
            path.unlink()
        config = out / _TOKENIZER_CONFIG
        if config.is_file():
            body = json.loads(config.read_text("utf-8"))
            if body.pop("chat_template", None) is not None:
                config.write_text(json.dumps(body, indent=2, ensure_ascii=False), "utf-8")
        if chat.template is not None:
            (out / TEMPLATE).write_text(chat.template, "utf-8")
    if not chat.stop_ids and not chat.stop_strings:
        return
    body = _generation_settings(out if (out / GENERATION).is_file() else base_folder)
    if chat.stop_ids:
        body["eos_token_id"] = chat.stop_ids if len(chat.stop_ids) > 1 else chat.stop_ids[0]
    if chat.stop_strings:
        body["stop_strings"] = chat.stop_strings
    (out / GENERATION).write_text(json.dumps(body, indent=2, sort_keys=True), "utf-8")


def _generation_settings(folder: Path) -> dict[str, Any]:
    """Returns the generation settings of a model; without a file those of its configuration."""
    path = folder / GENERATION
    if path.is_file():
        return dict(json.loads(path.read_text("utf-8")))
    config = model_config(folder)
    nested = config.get("text_config")
    merged = {**(nested if isinstance(nested, dict) else {}), **config}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: merged[name] for name in names if merged.get(name) is not None}


def _end_ids(folder: Path) -> list[int]:
    ends = _generation_settings(folder).get("eos_token_id")
    return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]


def _templates(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Returns the tokenizer's templates, the default one first; or that of the processor."""
    found: Any = getattr(tokenizer, "chat_template", None)
    older = folder / "chat_template.json"  # of older vision-language models
    if not found and older.is_file():
        found = json.loads(older.read_text("utf-8")).get("chat_template")
    if isinstance(found, Mapping):
        return [found[name] for name in sorted(found, key=lambda name: (name != "default", name))]
    return [found] if found else []


def _best_template(
    renderer: Renderer, name: str, templates: list[str], tokenizer: Tokenizer
) -> tuple[str | None, bool]:
    """Returns the first template that gives the renderer's tokens, else the first that gives its
    text, and whether the tokens are equal."""
    prompts = list(_prompts(renderer))
    same_text = None
    for template in _candidates(renderer, name, templates, tokenizer):
        agreement = _agreement(template, prompts, tokenizer)
        if agreement == "tokens":
            return template, True
        if agreement == "text" and same_text is None:
            same_text = template
    if same_text is None and (found := chat_format(renderer, tokenizer)) and not found.has_system:
        # The renderer joins system and user message, which the derived template refuses.
        plain = [one for one in prompts if one[0][0]["role"] != "system"]
        agreement = _agreement(found.jinja(), plain, tokenizer)
        return (found.jinja() if agreement else None), agreement == "tokens"
    return same_text, False


def _candidates(
    renderer: Renderer, name: str, templates: list[str], tokenizer: Tokenizer
) -> Iterator[str]:
    yield from templates
    options = {key: argument(value) for key, value in parse_qsl(name.partition("?")[2])}
    for template in templates:
        for arguments in (options, *_ARGUMENTS):
            known = {key: value for key, value in arguments.items() if key in template}
            if known and known.keys() == arguments.keys():
                # A default, so that a request can still choose another value.
                yield (
                    "".join(
                        f"{{%- if {key} is not defined %}}{{%- set {key} = {json.dumps(value)} %}}"
                        "{%- endif %}"
                        for key, value in known.items()
                    )
                    + template
                )
    found = chat_format(renderer, tokenizer)
    if found is not None:
        yield found.jinja()


def _prompts(renderer: Renderer) -> Iterator[tuple[list[Message], list[int]]]:
    for messages in conversations():
        try:
            yield messages, renderer.build_generation_prompt(messages).to_ints()
        except TinkerCookbookError:  # such as a format without system messages
            continue


def _agreement(
    template: str, prompts: list[tuple[list[Message], list[int]]], tokenizer: Tokenizer
) -> str:
    """Returns ``tokens`` or ``text``, whichever of the prompts a template reproduces, else ""."""
    # Templates of some vision-language models know content as a list of parts alone.
    in_parts = [
        ([{**one, "content": ensure_list(one["content"])} for one in messages], expected)
        for messages, expected in prompts
    ]
    return _agreement_as_given(template, prompts, tokenizer) or _agreement_as_given(
        template, in_parts, tokenizer
    )


def _agreement_as_given(
    template: str, prompts: Sequence[tuple[Sequence[Any], list[int]]], tokenizer: Tokenizer
) -> str:
    same = "tokens" if prompts else ""
    for messages, expected in prompts:
        try:
            text: Any = tokenizer.apply_chat_template(
                messages,  # pyright: ignore[reportArgumentType]
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception:  # a template is a program and may raise anything
            return ""
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if tokens == expected:
            continue
        if tokenizer.decode(tokens) != tokenizer.decode(expected):
            return ""
        same = "text"
    return same


def _described(name: str, template: str | None, exact: bool, given: str | None) -> str:
    if template is None:
        left_out = "; the base model's was left out" if given else ""
        return f"none: no template gives the prompts of the renderer {name}{left_out}"
    if template == given:
        text = f"the base model's, which gives the prompts of the renderer {name}"
    elif given and template.endswith(given):
        text = f"the base model's, with the arguments of the renderer {name} as defaults"
    else:
        other = "; the base model's gives other prompts and was replaced" if given else ""
        text = f"written for the renderer {name}{other}"
    return text if exact else f"{text}; its text is the same, but some tokens are split otherwise"
