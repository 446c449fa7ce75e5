"""Kimi K2.5 and K2.6 by their text: prompts, tools as TypeScript types, images, answers."""

from __future__ import annotations

import copy

import pytest
from families.kimi_k2 import TOKENS
from PIL import Image

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.renderers.kimi_k2_5_tool_declaration_ts import encode_tools_to_typescript_style
from tinker_cookbook.tokenizer_utils import get_tokenizer

HI = {"role": "user", "content": "Hi"}
THINKS = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Ho"}],
}
PLAIN = {"role": "assistant", "content": "Ho"}
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"


class Processor:
    def get_resize_config(self, image_data):
        assert image_data["image"].size == (8, 4)
        return {"num_tokens": 5}


@pytest.fixture(scope="module")
def kimi(tokenizer_folder):
    tokenizer = copy.deepcopy(get_tokenizer(tokenizer_folder("qwen3")))
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    return lambda spec, **options: get_renderer(spec, tokenizer, **options)


def prompt(renderer, messages):
    return renderer.codec.decode(renderer.build_generation_prompt(messages).to_ints())


@pytest.mark.parametrize(
    ("spec", "opened", "history"),
    [
        ("kimi_k25", "<think>", "<think></think>Ho"),
        ("kimi_k26", "<think>", "<think></think>Ho"),
        ("kimi_k25_disable_thinking", "<think></think>", "<think></think>Ho"),
        ("kimi_k26_disable_thinking", "<think></think>", "<think></think>Ho"),
        ("kimi_k26_preserve_thinking", "<think>", "<think>Hm.</think>Ho"),
    ],
)
def test_prompts_open_the_block_and_examples_continue_them(kimi, spec, opened, history):
    renderer = kimi(spec)
    assert prompt(renderer, [HI, THINKS, HI]).endswith(
        f"{ASSISTANT}{history}<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>{ASSISTANT}{opened}"
    )
    answer = PLAIN if "disable" in spec else THINKS
    example, weights = renderer.build_supervised_example([HI, answer])
    before = renderer.build_generation_prompt([HI]).to_ints()
    tokens = example.to_ints()
    assert tokens[: len(before)] == before
    assert weights.tolist() == [0.0] * len(before) + [1.0] * (len(tokens) - len(before))
    assert renderer.parse_response(tokens[len(before) :])[0] == answer


def test_images_count_as_the_processor_says(kimi):
    renderer = kimi("kimi_k25", image_processor=Processor())
    shown = {"type": "image", "image": Image.new("RGB", (8, 4))}
    message = {"role": "user", "content": [{"type": "text", "text": "See"}, shown]}
    before, image, after = renderer.build_generation_prompt([message]).chunks
    assert image.expected_tokens == 5
    assert renderer.codec.decode(before.tokens).endswith("See<|media_begin|>image<|media_content|>")
    assert renderer.codec.decode(after.tokens).startswith("<|media_end|>\n<|im_end|>")


def test_tools_are_types(kimi):
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "city": {"type": "string", "description": "Where?", "maxLength": 9},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"name": "look", "description": "Weather", "parameters": parameters}
    declared, system = kimi("kimi_k25").create_conversation_prefix_with_tools([tool], "Be brief.")
    assert (declared["role"], system["content"]) == ("tool_declare", "Be brief.")
    assert declared["content"] == (
        "# Tools\n\n## functions\nnamespace functions {\n// Weather\ntype look = (_: {\n"
        "  // Where?\n  // maxLength: 9\n  city: string,\n"
        "  days?: Array<\n    // minimum: 1\n    number\n  >,\n"
        '  // Default: "C"\n  unit?: "C" | "F",\n  [k: string]: never\n}) => any;\n}\n'
    )


def test_references_become_interfaces():
    place = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Place"}}}
    parameters = {"$defs": {"Place": place}, "properties": {"at": {"$ref": "#/$defs/Place"}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    assert "interface Place {\n  next?: Place\n}\ntype go = (_: {\n  at?: Place\n})" in (
        encode_tools_to_typescript_style([tool])
    )
    del parameters["$defs"]
    with pytest.raises(RendererError, match=r"go: got \$ref '#/\$defs/Place', expected"):
        encode_tools_to_typescript_style([tool])
