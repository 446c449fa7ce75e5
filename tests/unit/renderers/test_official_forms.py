"""Renderers written for the official cookbook, and forms in which messages are written and read."""

from __future__ import annotations

import pickle

import pytest
import tinker

from tinker_cookbook.renderers import Renderer, get_renderer, register_renderer, unregister_renderer
from tinker_cookbook.renderers.base import (
    Message,
    ParseTermination,
    ReasoningStreamingParser,
    RenderContext,
    RenderedMessage,
    StreamingParser,
    StreamingTextDelta,
    StreamingThinkingDelta,
    UnsupportedToolsError,
    ensure_text,
)
from tinker_cookbook.renderers.qwen3 import Qwen3InstructRenderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

HI: Message = {"role": "user", "content": "Hi"}
CALL = {"function": {"name": "look", "arguments": '{"q": 1}'}}


class Brackets(Renderer):
    """As the official cookbook's readers write one: three methods and the tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer  # no super().__init__

    @property
    def _bos_tokens(self):
        return self.tokenizer.encode("<s>", add_special_tokens=False)

    def get_stop_sequences(self):
        return ["]"]

    def render_message(self, message, ctx):
        def chunk(text):
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            return tinker.types.EncodedTextChunk(tokens=tokens)

        header = chunk(f"[{message['role']}{ctx.idx}:")
        return RenderedMessage(header=header, output=[chunk(ensure_text(message["content"]) + "]")])

    def parse_response(self, response):
        text = str(self.tokenizer.decode(response)).removesuffix("]")
        return Message(role="assistant", content=text), ParseTermination.STOP_SEQUENCE


@pytest.fixture
def load(tokenizer_folder):
    return lambda spec, family="qwen3": get_renderer(spec, get_tokenizer(tokenizer_folder(family)))


def test_three_methods_make_a_renderer(tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    register_renderer("test/brackets", lambda tokenizer, image_processor=None: Brackets(tokenizer))
    try:
        renderer = pickle.loads(pickle.dumps(get_renderer("test/brackets", tokenizer)))
    finally:
        unregister_renderer("test/brackets")
    chat = [HI, {"role": "assistant", "content": "Ho <|im_end|>"}]
    prompt = tokenizer.decode(renderer.build_generation_prompt(chat[:1]).to_ints())
    assert prompt == "<s>[user0:Hi][assistant1:"
    example, weights = renderer.build_supervised_example(chat)
    pairs = zip(example.to_ints(), weights.tolist(), strict=True)
    assert tokenizer.decode([token for token, weight in pairs if weight]) == "Ho <|im_end|>]"
    response = tokenizer.encode("Ho]")
    assert renderer.parse_response(response)[0]["content"] == "Ho"
    assert list(renderer.parse_response_streaming(response))[-1]["content"] == "Ho"
    with pytest.raises(NotImplementedError):
        renderer.create_conversation_prefix_with_tools([])
    assert issubclass(UnsupportedToolsError, NotImplementedError)


def test_a_renderer_without_a_name_does_not_pickle(tokenizer_folder):
    renderer = Brackets(get_tokenizer(tokenizer_folder("qwen3")))
    with pytest.raises(pickle.PicklingError, match="not set"):
        pickle.dumps(renderer)


def test_a_message_renders_to_chunks_without_a_conversation(load):
    rendered = load("qwen3").render_message(HI, RenderContext(idx=0, is_last=True))
    assert all(isinstance(c, tinker.EncodedTextChunk) for c in (rendered.header, *rendered.output))
    assert not RenderContext(idx=0, is_last=True).in_last_assistant_turn
    assert RenderContext(idx=2, is_last=True, last_user_index=1).in_last_assistant_turn


@pytest.mark.parametrize("spec", ["qwen3_5", "qwen3_8_medium_reasoning"])
def test_an_empty_block_in_history_has_the_tokens_of_the_whole_text(load, spec):
    renderer = load(spec)
    answer = {"role": "assistant", "content": "Look", "tool_calls": [CALL]}
    prompt = renderer.build_generation_prompt([HI, answer, {"role": "tool", "content": "2"}])
    tokens = prompt.to_ints()
    assert tokens == renderer.tokenizer.encode(renderer.codec.decode(tokens))
    example = renderer.build_supervised_example([HI, answer])[0].to_ints()
    asked = renderer.build_generation_prompt([HI]).to_ints()
    assert example[: len(asked)] == asked  # the last answer continues the prompt's own tokens


def test_arguments_of_calls_are_objects_where_the_template_takes_them_apart(load):
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for spec, expected in [("qwen3_5", {"q": 1}), ("qwen3", '{"q": 1}')]:
        renderer = load(spec)
        (normal,) = renderer._normalize([message])
        found = renderer.to_openai_message(normal)["tool_calls"][0]["function"]["arguments"]
        assert found == expected


def test_instruct_leaves_thinking_out_of_history_and_writes_it_in_the_last_answer(load):
    renderer = load("qwen3_instruct")
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Ho"}]
    answer = {"role": "assistant", "content": parts}
    example, weights = renderer.build_supervised_example([HI, answer, HI, answer])
    assert renderer.codec.decode(example.to_ints()).count("<think>Hm.</think>Ho") == 1
    pairs = zip(example.to_ints(), weights.tolist(), strict=True)
    assert renderer.parse_response([t for t, w in pairs if w])[0] == answer
    kept = Qwen3InstructRenderer(renderer.tokenizer, strip_thinking_from_history=False)
    example, _ = kept.build_supervised_example([HI, answer, HI, answer])
    assert kept.codec.decode(example.to_ints()).count("<think>Hm.</think>Ho") == 2


def test_role_colon_writes_the_text_with_calls_and_says_so(load, caplog):
    renderer = load("role_colon", "llama3")
    answer = {"role": "assistant", "content": "Look", "tool_calls": [CALL]}
    tokens = renderer.build_generation_prompt([HI, answer]).to_ints()
    assert renderer.codec.decode(tokens).endswith("Assistant: Look\n\nAssistant:")
    assert "no form for tool calls" in caplog.text


def test_role_colon_reads_eos_behind_the_stop_as_malformed(load):
    renderer = load("role_colon", "llama3")

    def read(text, eos):
        tokens = renderer.tokenizer.encode(text, add_special_tokens=False)
        return renderer.parse_response(
            [*tokens, renderer.tokenizer.eos_token_id][: None if eos else -1]
        )

    assert read(" Ho\n\nUser:", eos=False)[1] is ParseTermination.STOP_SEQUENCE
    assert read(" Ho\n\nUser:", eos=True)[1] is ParseTermination.MALFORMED
    message, how = read(" Ho\n\n", eos=True)
    assert (message["content"], how) == ("Ho", ParseTermination.EOS)
    assert f"{ParseTermination.EOS}" == "eos"


def test_streaming_parsers_of_single_tokens(load):
    renderer = load("qwen3")
    (end,) = renderer.get_stop_sequences()
    tokens = renderer.tokenizer.encode("<think>Hm</think>Ho é🙂")
    for kind, thinking in [(StreamingParser, ""), (ReasoningStreamingParser, "Hm")]:
        parser = kind(renderer.tokenizer, end, renderer.parse_response)
        for _ in range(2):
            deltas = [d for t in [*tokens, end] for d in parser.feed(t)]
            deltas += parser.finish()
            text = "".join(d.text for d in deltas if isinstance(d, StreamingTextDelta))
            thought = "".join(d.thinking for d in deltas if isinstance(d, StreamingThinkingDelta))
            assert text == ("Ho é🙂" if thinking else "<think>Hm</think>Ho é🙂")
            assert thought == thinking
            assert deltas[-1]["role"] == "assistant"
            parser.reset()
