"""Mistral's formats against Mistral's own library: see ``mistral_cases.py``.

The texts of the SentencePiece versions are compared on a byte-level stand-in and on a small
SentencePiece vocabulary. Neither is Mistral's, so texts are compared, control tokens by name.
"""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import pytest
from family_case import assert_any_cut
from hypothesis import given
from hypothesis import strategies as st
from mistral_cases import (
    HELLO,
    QUESTION,
    TOOLS,
    V3_TOKENS,
    V7_TOKENS,
    as_vector,
    conversation,
    each_version,
    expected,
    prompt_text,
    rows,
    text_of,
    tokens_of,
)
from rendering_cases import FRAGMENTS, ascii_text, checked

from tinker_cookbook.renderers import (
    ParseTermination,
    ToolCall,
    ToolSpec,
    get_renderer,
)


@pytest.mark.parametrize("family", ["llama3", "stories"])
@each_version
def test_texts_equal_those_of_the_library(stand_in, family, version):
    renderer = get_renderer(f"mistral?version={version}", stand_in(family))
    assert len([*rows(version)]) >= 200
    for row in rows(version):
        messages = conversation(renderer, row)
        wanted = expected(row, version)
        assert as_vector(text_of(renderer, messages), version) == wanted
        assert as_vector(prompt_text(renderer, messages), version) == wanted


@each_version
def test_control_tokens_are_exactly_those_that_the_format_writes(renderers, version):
    """Names in texts are not among them: the texts are the same, the tokens are not."""
    renderer = renderers[version]
    control = {renderer.tokenizer.convert_tokens_to_ids(t): t for t in (*V3_TOKENS, *V7_TOKENS)}
    split = get_renderer(f"mistral?version={version}&split_special_tokens=true", renderer.tokenizer)
    for row in rows(version):
        messages = conversation(renderer, row)
        tokens = tokens_of(renderer, messages)
        roles = [a["role"] for a, b in pairwise([*messages, QUESTION])]
        found = [control[t] for t in tokens if t in control]
        assert found.count("<s>") == 1
        answers = [r for r, before in zip(roles, ["", *roles], strict=False) if r != before]
        assert found.count("</s>") == sum(
            # Answers in a row are one; a call and the next answer have results between them.
            role == "assistant"
            for role in answers
        )
        assert found.count("[TOOL_RESULTS]") == roles.count("tool")
        assert found.count("[AVAILABLE_TOOLS]") == (row[1] > 0)
        assert tokens_of(split, messages) == tokens


@each_version
def test_weights_are_the_answer_and_its_end(renderers, version):
    renderer = renderers[version]
    seen = 0
    for row in rows(version):
        messages = conversation(renderer, row)
        if messages[-1]["role"] != "assistant" or messages[-2]["role"] == "assistant":
            continue
        seen += 1
        example, weights = renderer.build_supervised_example(messages)
        tokens = example.to_ints()
        prompt = renderer.build_generation_prompt(messages[:-1]).to_ints()
        assert tokens[: len(prompt)] == prompt
        assert weights.tolist() == [float(i >= len(prompt)) for i in range(len(tokens))]
        trained = renderer.codec.decode(tokens[len(prompt) :])
        space = "" if version.endswith("tekken") else " "
        if "tool_calls" in messages[-1]:
            assert trained.startswith(f"[TOOL_CALLS]{space}[{{")
            assert trained.endswith("}]</s>")
        else:
            assert trained == f"{space}{messages[-1]['content'].rstrip(' ')}</s>"
    assert seen > 50


call = st.builds(
    lambda name, arguments, id_: ToolCall(
        function=ToolCall.FunctionBody(
            name=name, arguments=json.dumps(arguments, ensure_ascii=False)
        ),
        id=id_,
    ),
    st.sampled_from(["search", "get-x_2"]),
    st.dictionaries(
        st.text(max_size=5),
        st.integers() | st.text(max_size=8) | st.none() | st.lists(st.booleans(), max_size=2),
        max_size=3,
    ),
    st.text(alphabet="abcXYZ019", min_size=9, max_size=9),
)
said = (
    st.lists(
        st.sampled_from([*FRAGMENTS, "[", "[TOOL", "[TOOL_CALL]", "[/INST]", "</s"]), max_size=6
    )
    .map("".join)
    .map(lambda text: text.rstrip(" "))
)


@st.composite
def answers(draw, both):
    calls = draw(st.lists(call, max_size=2))
    content = draw(said) if both or not calls else ""
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": calls} if calls else message


@each_version
def test_parse_gives_the_message_back_in_any_cut(renderers, version):
    renderer = renderers[version]

    @checked(40)
    @given(answer=answers(both=version.startswith("v7")), data=st.data())
    def check(answer, data):
        example, weights = renderer.build_supervised_example([QUESTION, answer])
        tokens = [t for t, w in zip(example.to_ints(), weights.tolist(), strict=True) if w]
        assert renderer.parse_response(tokens) == (answer, ParseTermination.STOP_SEQUENCE)
        keep = data.draw(st.integers(0, len(tokens)))
        for part in (tokens, tokens[:keep]):
            assert_any_cut(renderer, part, data)

    check()


@pytest.mark.parametrize("family", ["llama3", "stories"])
@each_version
def test_random_tokens_never_raise_and_cut_alike(stand_in, family, version):
    renderer = get_renderer(f"mistral?version={version}", stand_in(family))
    control = sorted(renderer.tokenizer.added_tokens_decoder)
    size = len(renderer.tokenizer)
    words = renderer.codec.encode('[{"name": "f", "arguments": {"q": 1}, "id": "a"}]')
    token = st.integers(0, size - 1) | st.sampled_from(control) | st.sampled_from(words)

    @checked(25)
    @given(tokens=st.lists(token, max_size=12), data=st.data())
    def check(tokens, data):
        assert_any_cut(renderer, tokens, data)
        message, _ = renderer.parse_response(tokens)
        text_of(renderer, [QUESTION, message]) if version.startswith("v7") else None

    check()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "Expecting value"),
        ("[]", "a JSON list"),
        ('{"name": "f", "arguments": {}}', "a JSON list"),
        ('[{"name": "f"}]', "call 0"),
        ('[{"name": "f", "arguments": {}, "why": 1}]', "call 0"),
        ('[{"name": "f", "arguments": "no json"}]', "Expecting value"),
        ('[{"name": "f", "arguments": {}, "id": 3}]', "id"),
        ('[{"name": "f", "arguments": {"x": "\\ud800"}}]', ""),
        ("[" * 100_000, "deeply"),
        ('[{"name": "f", "arguments": {}}] and more', "Extra data"),
    ],
)
@each_version
def test_unparsable_calls_round_trip(renderers, version, body, error):
    renderer = renderers[version]
    tokens = [*renderer.codec.encode(f"[TOOL_CALLS]{body}</s>")]
    message, how = renderer.parse_response(tokens)
    assert how is ParseTermination.STOP_SEQUENCE
    (unread,) = message["unparsed_tool_calls"]
    assert unread.raw_text == f"[TOOL_CALLS]{body}"
    assert error in unread.error
    hint = {"role": "user", "content": "Again."}
    if len(body) < 1000:
        assert f"[/INST][TOOL_CALLS]{body}</s>[INST]" in text_of(
            renderer, [QUESTION, message, hint, HELLO]
        )


@each_version
def test_prompts_extend_each_other_where_nothing_moves(renderers, version):
    """Not with tools, nor in v3 with a system prompt: both stand before the last question."""
    renderer = renderers[version]
    assert not renderer.has_extension_property
    turns = [QUESTION, HELLO, QUESTION, HELLO]
    system = [{"role": "system", "content": "S"}]
    tools = renderer.create_conversation_prefix_with_tools([ToolSpec(**TOOLS[0])])
    counts = [
        len(renderer.build_merged_examples([*begin, *turns], "all_assistant_messages"))
        for begin in ([], system, tools)
    ]
    assert counts == [1, 1 if version.startswith("v7") else 2, 2]

    @checked(20)
    @given(user=st.lists(ascii_text, min_size=3, max_size=3), reply=said)
    def check(user, reply):
        messages = [{"role": "user", "content": text} for text in user]
        answer = {"role": "assistant", "content": reply}
        history = [messages[0], answer, messages[1], answer, messages[2]]
        for end in (1, 3):
            answered = tokens_of(renderer, history[: end + 1])
            assert (
                renderer.build_generation_prompt(history[:end]).to_ints()
                == (answered[: len(renderer.build_generation_prompt(history[:end]).to_ints())])
            )
            after = renderer.build_generation_prompt(history[: end + 2]).to_ints()
            assert after[: len(answered)] == answered

    check()


def test_the_version_is_read_off_the_tokenizer(stand_in):
    v3, v7 = V3_TOKENS, [*V3_TOKENS, *V7_TOKENS]
    for family, tokens, version in [
        ("llama3", v3, "v3_tekken"),
        ("llama3", v7, "v7_tekken"),
        ("stories", v3, "v3"),
        ("stories", v7, "v7"),
    ]:
        assert get_renderer("mistral", stand_in(family, tokens)).version == version
    tokenizer = copy.copy(stand_in("llama3", v7))
    tokenizer.chat_template = "[INST]{{ messages }}[/INST]"
    assert get_renderer("mistral", tokenizer).version == "v3_tekken", "the template counts more"
