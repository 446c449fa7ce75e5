"""Renderers by name: options, pickling, errors, and what importing the package costs."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest

from tinker_cookbook import renderers
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import ToolCall, get_renderer
from tinker_cookbook.renderers.qwen3 import Qwen3Renderer
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

CONVERSATION = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "<think>\nt\n</think>\n\na"},
    {"role": "user", "content": "r"},
]
CALL = ToolCall(function=ToolCall.FunctionBody(name="f", arguments='{"x": 1}'))


def test_import_stays_light():
    code = (
        "import sys, json; from tinker_cookbook import renderers; "
        "renderers.check_renderer_name('qwen3?strip_thinking_from_history=false'); "
        "print(json.dumps([m for m in "
        "('torch', 'transformers', 'tinker', 'datasets', 'tokenizers') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert json.loads(done.stdout) == []


def test_options_by_name_and_by_keyword_agree(tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    by_name = get_renderer("qwen3?strip_thinking_from_history=false", tokenizer)
    by_keyword = get_renderer("qwen3", tokenizer, strip_thinking_from_history=False)
    default = get_renderer("qwen3", tokenizer)
    prompts = [
        renderer.build_generation_prompt(CONVERSATION).to_ints()
        for renderer in (by_name, by_keyword, default)
    ]
    assert prompts[0] == prompts[1] != prompts[2]
    assert by_name.spec == by_keyword.spec == "qwen3?strip_thinking_from_history=false"
    assert default.spec == "qwen3"


@pytest.mark.parametrize(
    ("spec", "family"),
    [
        ("qwen3?strip_thinking_from_history=false", "qwen3"),
        ("llama3?today_date=26%20Jul%202024", "llama3"),
        ("chatml?default_system=", "smollm2"),
        ("smollm2", "smollm2"),
    ],
)
def test_pickled_by_name(tokenizer_folder, spec, family):
    tokenizer = get_tokenizer(tokenizer_folder(family))
    renderer = get_renderer(spec, tokenizer)
    pickled = pickle.dumps(renderer)
    assert len(pickled) < 1000  # a name, not a vocabulary
    for again in (pickle.loads(pickled), copy.deepcopy(renderer)):
        assert again.spec == spec
        assert type(again) is type(renderer)
        assert again.tokenizer is tokenizer
        prompt = again.build_generation_prompt(CONVERSATION).to_ints()
        assert prompt == renderer.build_generation_prompt(CONVERSATION).to_ints()


class ShoutingRenderer(RoleColonRenderer):
    def __init__(self, tokenizer, image_processor=None, *, marks=1, loud=False):
        super().__init__(tokenizer, image_processor)
        self.marks, self.loud = marks, loud


def test_registered_renderer(tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder("smollm2"))
    renderers.register_renderer("shout", ShoutingRenderer)
    try:
        assert renderers.is_renderer_registered("shout")
        assert renderers.get_registered_renderer_names() == ["shout"]
        renderer = pickle.loads(pickle.dumps(get_renderer("shout?marks=3&loud=true", tokenizer)))
        assert (renderer.marks, renderer.loud) == (3, True)
        assert renderer.spec == "shout?loud=true&marks=3"
        with pytest.raises(ConfigurationError, match=r"shout\?marks: got 'x', expected a whole"):
            get_renderer("shout?marks=x", tokenizer)
    finally:
        assert renderers.unregister_renderer("shout")
    assert not renderers.unregister_renderer("shout")
    with pytest.raises(ConfigurationError, match="shout"):
        get_renderer("shout", tokenizer)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "qwen33",
            {},
            r"renderer_name: got 'qwen33', expected one of chatml, .*; did you mean 'qw",
        ),
        ("qwen3?strip_thinking=false", {}, "qwen3 has no option 'strip_thinking', expected one of"),
        ("llama3", {"date": "x"}, "llama3 has no option 'date', expected one of today_date"),
        ("role_colon", {"x": 1}, "has no option 'x', expected one of split_special_tokens"),
        ("qwen3?compact_thinking_every=0", {}, "got 0, expected the number of answers"),
        ("qwen3_instruct?compact_thinking_every=3", {}, "qwen3_instruct.*no thinking"),
        ("qwen3?strip_thinking_from_history=maybe", {}, "got 'maybe', expected true or false"),
        ("qwen3", {"strip_thinking_from_history": "no"}, "got 'no', expected true or false"),
        ("qwen3?strip", {}, "got options 'strip', expected option=value&option=value"),
    ],
)
def test_invalid_names_and_options_are_refused(tokenizer_folder, name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        get_renderer(name, get_tokenizer(tokenizer_folder("qwen3")), **options)


IMAGE = [{"type": "image", "image": "x.png"}]
THINKING = [{"type": "thinking", "thinking": "t"}]


class MediaRenderer(RoleColonRenderer):
    """Writes media as a chunk, as renderers of other packages return them."""

    def render_message(self, message, ctx):
        import tinker

        image = tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=5)
        text = tinker.EncodedTextChunk(tokens=[1, 2])
        return renderers.RenderedMessage(header=[7], output=[text, image, [3]])


def test_chunks_of_the_sdk_are_pieces_too(tokenizer_folder):
    renderer = MediaRenderer(get_tokenizer(tokenizer_folder("qwen3")))
    model_input, weights = renderer.build_supervised_example(CONVERSATION[1:2])
    assert [chunk.length for chunk in model_input.chunks] == [3, 5, 1]
    assert list(model_input.chunks[0].tokens) == [7, 1, 2]
    assert weights.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 1]


def test_a_position_of_the_official_cookbook_is_refused(tokenizer_folder):
    """Its second argument is ``strip_thinking_from_history``, ours is ``image_processor``."""
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    with pytest.raises(RendererError, match="pass strip_thinking_from_history=False by its name"):
        Qwen3Renderer(tokenizer, False)
