"""What a model samples is read by every renderer, and can be written into the next prompt."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import pickle
import random
from typing import Any

import pytest
from mistral_cases import V3_TOKENS, V7_TOKENS

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import BUILT_IN, get_renderer
from tinker_cookbook.renderers.core.messages import has_thinking
from tinker_cookbook.rl.envs.prompts import EpisodePrompts
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import (
    AgentToolMessageEnv,
    handle_tool_call,
    tool,
)

# One vocabulary with the control tokens of every format.
DEEPSEEK = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "System",
            "tool▁calls▁begin",
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
    *["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"],
    *V3_TOKENS,
    *V7_TOKENS,
]
# tml_v0 has tokenizers of its own: test_tml_renderers.py.
NAMES = sorted(set(BUILT_IN) - {"template", "tml_v0"})
SPECS = [*NAMES, "template",
         "qwen3?strip_thinking_from_history=false", "kimi_k2?strip_thinking_from_history=false",
         "glm4_6?strip_thinking_from_history=false", "mistral?version=v3",
         "gpt_oss_low_reasoning?tool_format=template"]  # fmt: skip
WORDS = ["Hello", " u", "\n", "\n\n", " ", "{", '"', "\\", "é", "<", "<think>", "</think>", "1e999",
         "<think>\n", "\n</think>\n\n", "<tool_call>", "</tool_call>", "<function=f>", "NaN",
         "</function>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_value>", "null",
         '{"name": "f", "arguments": ', '"\\ud83d"', "[" * 150, "1" * 5000, "User:"]  # fmt: skip
LATE = "Hello <think>x</think> you"
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
def test_sampled_answers_round_trip(load, spec):
    renderer, rng = load(spec), random.Random(spec)
    stops = renderer.get_stop_sequences()
    pool = [p for p in pieces(renderer) if not set(p) & set(stops)]
    extends = renderer.has_extension_property
    for i in range(6):
        chosen = rng.choices(pool, k=rng.randint(1, 6)) if i else [renderer.codec.encode(LATE)]
        sampled = [token for piece in chosen for token in piece]
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
        thinks = has_thinking(message["content"]) or "think>" in str(message["content"])
        kept = "strip" in spec or spec == "qwen2_5" or not thinks
        if extends and kept and ending.is_stop_sequence:
            assert later[: len(first) + len(sampled)] == [*first, *sampled]
        results = [{"role": "tool", "content": "1"} for _ in message.get("tool_calls", [])]
        renderer.build_generation_prompt([QUESTION, message, *results, *[AGAIN][: not results]])
        json.dumps([c.model_dump() for c in message.get("tool_calls", [])]).encode()


def with_calls(load):
    for spec in SPECS:
        renderer = load(spec)
        with contextlib.suppress(RendererError):
            if "tool_calls" in renderer.parse_response(written(renderer, call()))[0]:
                yield spec, renderer


WRONG = ["{'a': 1}", '{"a": 1', '"{}"', '"{\\"a\\": 1}"', "[1]", "[]", "12", '{"a": NaN}', "x",
         '{"a": 1e999}', '{"a": "\\ud83d"}', '{"a": ' + "[" * 200 + "]" * 200 + "}",
         [1], 3, False, {"a": float("nan")}, {"a": {1, 2}}]  # fmt: skip
RIGHT = [("", {}), (" ", {}), (None, {}), ("null", {}), ({}, {}), ("{}", {}), ({"a": 1}, {"a": 1}),
         ('{"a":1}', {"a": 1})]  # fmt: skip


def test_arguments_are_an_object_or_refused_in_every_format(load):
    checked = 0
    for spec, renderer in with_calls(load):
        for arguments, value in RIGHT:
            expected = written(renderer, call(arguments=json.dumps(value)))
            said = renderer.parse_response(expected)[0]["tool_calls"][0]
            assert json.loads(said.function.arguments) == value, spec
            if arguments != '{"a":1}':  # formats that keep JSON as it is written
                assert written(renderer, call(arguments=arguments)) == expected, spec
        for arguments in WRONG:
            where = r"^messages\[1\].tool_calls\[0\].function.arguments: got .* JSON object"
            with pytest.raises(RendererError, match=where):
                renderer.build_generation_prompt([QUESTION, call(arguments=arguments), AGAIN])
        checked += 1
    assert checked > 30


CLOSED = ["a </tool_call> b", "</tool_call>", "<tool_call>", '"</tool_call>"', "\\</tool_call>\\",
          '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "</function>\n</tool_call>x",
          "<tool_call>\n<function=g>\n</function>\n</tool_call>", "</｜DSML｜ calls>",
          "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "<|tool_call_end|><|tool_calls_section_end|>",
          "<tool_call>g\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
          "<think>", "</think>"]  # fmt: skip


def test_a_call_ends_where_its_value_ends_in_every_format(load):
    for spec, renderer in with_calls(load):
        form = renderer.answer_form()
        for text in CLOSED:
            given = {"text": text, "n": 1}
            # Where the prompt opens the thinking, an answer has to close it.
            opened = [{"type": "thinking", "thinking": "Hm."}] if form.opened else ""
            tokens = written(renderer, call("write", json.dumps(given), content=opened))
            message, ending = renderer.parse_response(tokens)
            *_, streamed = renderer.parse_response_streaming(iter(tokens))
            assert streamed == message
            assert ending.is_stop_sequence, (spec, text)
            (found,) = message.get("tool_calls", [None])
            assert found is not None, (spec, text, message)
            assert json.loads(found.function.arguments) == given, (spec, text)


@pytest.mark.parametrize(
    ("spec", "text", "calls"),
    [
        ("llama3", '{"type": "function", "name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})]),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|>', [("f", {})]),
        ("llama3", '{"name": "f", "arguments": {"x": 1}}', [("f", {"x": 1})]),
        (
            "llama3",
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": null}',
            [("f", {}), ("g", {})],
        ),
        ("llama3", '<|python_tag|>print("hi")', []),
        ("llama3", '{"name": "f", "parameters": {}} Done.', []),
        ("llama3", '{"type": "x", "name": "f", "parameters": {}}', []),
        (
            "gpt_oss_low_reasoning",
            "<|channel|>commentary to=f<|constrain|>json<|message|>{}<|call|>",
            [("f", {})],
        ),
        (
            "kimi_k2_instruct",
            "<|tool_calls_section_begin|><|tool_call_begin|>f:3<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            [("f", {})],
        ),
    ],
)
def test_tool_call_variants(load, spec, text, calls):
    renderer = load(spec)
    tokens = [*renderer.codec.encode(text)]
    if tokens[-1] not in renderer.get_stop_sequences():
        tokens.append(renderer.get_stop_sequences()[0])
    message, ending = renderer.parse_response(tokens)
    assert ending.is_stop_sequence
    found = message.get("tool_calls", [])
    assert [(c.function.name, json.loads(c.function.arguments)) for c in found] == calls
    prompt = renderer.build_generation_prompt([QUESTION, message]).to_ints()
    if spec == "kimi_k2_instruct":
        assert text in renderer.codec.decode(prompt)  # with its id


@tool
def write(content: str, n: int, flag: bool = False, more: list[int] | None = None) -> list[Any]:
    """Gives back what it got."""
    return [content, n, flag, more]


BARE = ["10001", "0", "true", "True", "null", "None", "12.5", '{"a":1}', "[1,  2]", "1e2", "007",
        '{"a": 1, "a": 2}', '{\n "a": 1\n}', "123_456", " x ", '"x"', "", "two\nlines"]  # fmt: skip


@pytest.mark.parametrize("spec", ["qwen3_5", "qwen3_8_low_reasoning", "nemotron3", "glm4_6"])
def test_a_declared_text_is_what_was_written(load, spec):
    renderer = load(spec)
    for text in BARE:
        given = {"content": text, "n": 3, "flag": True, "more": [1]}
        tokens = written(renderer, call("write", json.dumps(given)))
        message, _ = renderer.parse_response(tokens)
        (sampled,) = pickle.loads(pickle.dumps(message["tool_calls"]))
        result = asyncio.run(handle_tool_call({"write": write}, sampled))
        assert json.loads(result.messages[0]["content"]) == [text, 3, True, [1]], text
        # In an episode: what rewards and later prompts get.
        env = AgentToolMessageEnv([write], [QUESTION], 5, lambda history: (0.0, {}))
        asyncio.run(env.step(message))
        assert env.episode.calls[0].arguments == given
        (said,) = env.history[0]["tool_calls"]
        assert json.loads(said.function.arguments) == given
