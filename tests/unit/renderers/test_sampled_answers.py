"""What a model samples is read by every renderer, and can be written into the next prompt."""

from __future__ import annotations

import contextlib
import copy
import json
import random

import pytest
from mistral_cases import V3_TOKENS, V7_TOKENS

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import BUILT_IN, get_renderer
from tinker_cookbook.renderers.core.messages import has_thinking
from tinker_cookbook.rl.envs.prompts import EpisodePrompts
from tinker_cookbook.tokenizer_utils import get_tokenizer

# One vocabulary with the control tokens of every format.
DEEPSEEK = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin",
            "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin",
            "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"]  # fmt: skip
PIPES = ["begin_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag",
         "im_user", "im_assistant", "im_system", "im_middle", "tool_calls_section_begin",
         "tool_calls_section_end", "tool_call_begin", "tool_call_end", "tool_call_argument_begin",
         "media_begin", "media_content", "media_end", "media_pad", "user", "assistant", "system",
         "observation", "start", "channel", "message", "end", "call", "return",
         "constrain"]  # fmt: skip
TOKENS = [
    *[f"<｜{name}｜>" for name in DEEPSEEK],
    *[f"<|{name}|>" for name in PIPES],
    *["｜DSML｜", "[gMASK]", "<sop>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<SPECIAL_20>"],
    *V3_TOKENS,
    *V7_TOKENS,
]
NAMES = sorted(set(BUILT_IN) - {"template"})
SPECS = [*NAMES, "template", "deepseekv3?version=3", "deepseekv3_thinking?version=3",
         "qwen3?strip_thinking_from_history=false", "kimi_k2?strip_thinking_from_history=false",
         "glm4_6?strip_thinking_from_history=false", "mistral?version=v3",
         "deepseekv3_2_thinking?strip_thinking_from_history=false",
         "gpt_oss_low_reasoning?text_before_call=analysis",
         "gpt_oss_low_reasoning?tool_format=template"]  # fmt: skip
WORDS = ["Hello", " u", "\n", "\n\n", " ", "{", '"', "\\", "é", "<", "<think>", "</think>", "1e999",
         "<think>\n", "\n</think>\n\n", "<tool_call>", "</tool_call>", "<function=f>", "NaN",
         "</function>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_value>", "null",
         '{"name": "f", "arguments": ', '"\\ud83d"', "[" * 150, "1" * 5000, "User:"]  # fmt: skip
QUESTION = {"role": "user", "content": "Hi"}
AGAIN = {"role": "user", "content": "again"}


@pytest.fixture(scope="module")
def load(tokenizer_folder):
    tokenizer = copy.deepcopy(get_tokenizer(tokenizer_folder("qwen3")))
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    made = {}

    def make(spec):
        if spec not in made:
            made[spec] = get_renderer(spec, tokenizer)
        return made[spec]

    return make


def call(name="f", arguments='{"x": "a"}', **more):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", **more, "tool_calls": [{"function": function}]}


def written(renderer, message):
    """Returns the tokens that a model samples to say ``message``."""
    example, weights = renderer.build_supervised_example([QUESTION, message])
    return [t for t, w in zip(example.to_ints(), weights.tolist(), strict=True) if w]


def pieces(renderer):
    """Returns what random answers are made of: words, tags, control tokens, calls of the format."""
    names = renderer.codec._control_tokens
    found = [list(renderer.codec.encode(word)) for word in WORDS]
    found += [list(renderer.codec.encode(f"a{name}"))[1:] for name in TOKENS if names]
    for arguments in ("{}", '{"x": "a</tool_call> b", "y": [1, {"z": null}]}'):
        with contextlib.suppress(RendererError):  # a format without calls
            found += [written(renderer, call(arguments=arguments))[:-1]] * 8
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_sampled_can_be_written_back(load, spec):
    renderer, rng = load(spec), random.Random(spec)
    stops = renderer.get_stop_sequences()
    pool = [p for p in pieces(renderer) if not set(p) & set(stops)]
    extends = renderer.has_extension_property
    for _ in range(25):
        sampled = [token for piece in rng.choices(pool, k=rng.randint(1, 6)) for token in piece]
        if isinstance(stops[0], int):
            # The other one of GLM begins a tool result.
            sampled.append(stops[0] if spec.startswith("glm") else rng.choice(stops))
        message, ending = renderer.parse_response(sampled)
        *_, streamed = renderer.parse_response_streaming(iter(sampled))
        assert streamed == message
        prompts = EpisodePrompts(renderer)
        first = prompts.build([QUESTION], None).to_ints()
        later = prompts.build([QUESTION, message, AGAIN], ([QUESTION, message], sampled)).to_ints()
        # A format in which the model does not think drops the thinking of such an answer.
        kept = "strip" in spec or spec == "qwen2_5" or not has_thinking(message["content"])
        if extends and kept and ending.is_stop_sequence:
            assert later[: len(first) + len(sampled)] == [*first, *sampled]
        results = [{"role": "tool", "content": "1"} for _ in message.get("tool_calls", [])]
        renderer.build_generation_prompt([QUESTION, message, *results, *[AGAIN][: not results]])
        json.dumps([c.model_dump() for c in message.get("tool_calls", [])]).encode()
