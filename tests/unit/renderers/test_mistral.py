"""Mistral's formats against Mistral's own library: see ``make_mistral_vectors.py``.

The texts of the SentencePiece versions are compared on a byte-level stand-in and on a small
SentencePiece vocabulary. Neither is Mistral's, so texts are compared, control tokens by name.
"""

from __future__ import annotations

import copy
import json
import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_mistral_vectors import TOOLS, VECTORS, VERSIONS, digest, unpacked
from rendering_cases import FRAGMENTS, ascii_text
from test_families import assert_any_cut, checked

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import (
    MistralRenderer,
    ParseTermination,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer, unregister_tokenizer

V3_TOKENS = [
    *["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    *["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
]
V7_TOKENS = ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
ROWS = json.loads(VECTORS.read_text(encoding="utf-8"))
QUESTION = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
each_version = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture(scope="module")
def stand_in(tokenizer_folder, stories_model):
    """``stand_in("llama3", …)``: a vocabulary with Mistral's control tokens."""
    made = {}

    def make(family="llama3", tokens=(*V3_TOKENS, *V7_TOKENS)):
        if (family, tuple(tokens)) not in made:
            folder = stories_model if family == "stories" else tokenizer_folder(family)
            tokenizer = copy.deepcopy(get_tokenizer(folder))
            tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
            tokenizer.chat_template = None
            made[family, tuple(tokens)] = tokenizer
        return made[family, tuple(tokens)]

    return make


@pytest.fixture(scope="module")
def renderers(stand_in):
    return {v: get_renderer(f"mistral?version={v}", stand_in()) for v in VERSIONS}


def conversation(renderer, row):
    messages = [unpacked(message) for message in row[0]]
    declared = renderer.create_conversation_prefix_with_tools(
        [ToolSpec(**tool) for tool in TOOLS[: row[1]]]
    )
    return [*declared, *messages]


def tokens_of(renderer, messages, what="last_assistant_message"):
    return renderer.build_supervised_example(messages, what)[0].to_ints()


def text_of(renderer, messages):
    return renderer.codec.decode(tokens_of(renderer, messages))


def prompt_text(renderer, messages, **options):
    return renderer.codec.decode(renderer.build_generation_prompt(messages, **options).to_ints())


def expected(row, version):
    return row[2][VERSIONS.index(version)]


def rows(version):
    """The library's vectors, but for tools without a question in v7: it leaves the tools out."""
    for row in ROWS:
        if row[1] == 0 or version.startswith("v3") or "user" in (m[0] for m in row[0]):
            yield row


def as_vector(text, version):
    return text if version.endswith("tekken") else digest(text)


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

    @checked(150)
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

    @checked(80)
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
        ('[{"name": "f g", "arguments": {}}]', "a function's name"),
        ('[{"name": "f", "arguments": {}, "why": 1}]', "why"),
        ('[{"name": "f", "arguments": "no json"}]', "Expecting value"),
        ('[{"name": "f", "arguments": {}, "id": 3}]', "id"),
        ('[{"name": "f", "arguments": {"x": "\\ud800"}}]', ""),
        ("[" * 100_000, "deeply"),
        ('[{"name": "f", "arguments": {}}] and more', "Extra data"),
    ],
)
@each_version
def test_unreadable_calls_are_kept_and_written_back(renderers, version, body, error):
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


def test_arguments_spelled_as_a_string_are_read(renderers):
    renderer = renderers["v3_tekken"]
    text = '[TOOL_CALLS][{"id": "a", "arguments": "{\\"q\\":1}", "name": "f"}]</s>'
    message, _ = renderer.parse_response(renderer.codec.encode(text))
    body = ToolCall.FunctionBody(name="f", arguments='{"q":1}')
    assert message["tool_calls"] == [ToolCall(function=body, id="a")]


def calls(*ids):
    body = ToolCall.FunctionBody(name="f", arguments="{}")
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [ToolCall(function=body, id=id_) for id_ in ids],
    }


def result(content, id_=None):
    message = {"role": "tool", "content": content}
    return {**message, "tool_call_id": id_} if id_ else message


def test_calls_without_a_proper_id_are_numbered_and_results_follow(renderers):
    messages = [
        QUESTION,
        calls(None, "call_two", "abcdefghi"),
        result("two", "call_two"),
        result("one"),
        result("three", "abcdefghi"),
        calls(None),
        result("four"),
        HELLO,
    ]
    text = text_of(renderers["v7_tekken"], messages)
    written = ["000000001", "000000000", "abcdefghi", "000000003"]
    assert [part[:9] for part in text.split("[TOOL_RESULTS]")[1:]] == written
    assert '"id": "000000000"}, {"name": "f", "arguments": {}, "id": "000000001"}' in text
    again = [*messages[:-1], calls("call_two"), result("x", "call_two"), HELLO]
    for before, after in pairwise([messages[: n + 1] for n in range(len(messages))]):
        assert prompt_text(renderers["v7_tekken"], after).startswith(
            prompt_text(renderers["v7_tekken"], before)
        )
    assert "[TOOL_RESULTS]000000004[TOOL_CONTENT]x" in text_of(renderers["v7_tekken"], again)


def test_a_result_behind_an_unread_call_has_a_number_too(renderers):
    unread = {"role": "assistant", "content": ""}
    unread["unparsed_tool_calls"] = [UnparsedToolCall(raw_text="[TOOL_CALLS][{", error="x")]
    text = text_of(renderers["v3_tekken"], [QUESTION, unread, result("no"), calls(None)])
    assert '[TOOL_CALLS][{</s>[TOOL_RESULTS]{"content": "no", "call_id": "000000000"}' in text
    assert '"id": "000000001"' in text


def test_what_the_library_refuses_but_has_one_obvious_form(renderers):
    empty = {"role": "assistant", "content": ""}
    assert text_of(renderers["v7"], [QUESTION, empty]) == "<s>[INST] Hi[/INST]</s>"
    both = {**calls("abcdefghi"), "content": "Look: "}
    assert "[/INST] Look:[TOOL_CALLS] [{" in text_of(renderers["v7"], [QUESTION, both])


def test_messages_in_a_row_are_one_and_parts_are_joined(renderers):
    renderer = renderers["v3_tekken"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, QUESTION, HELLO, HELLO]
    assert text_of(renderer, messages) == "<s>[INST]a\n\nb\n\nHi[/INST]Hello\n\nHello</s>"
    apart = [QUESTION, {**HELLO, "trainable": False}, {**HELLO, "trainable": True}]
    example, weights = renderer.build_supervised_example(apart, "customized")
    assert renderer.codec.decode(example.to_ints()) == "<s>[INST]Hi[/INST]Hello</s>Hello</s>"
    assert weights.tolist() == [0.0] * 6 + [1.0] * 2


def test_v3_begins_with_a_question_and_v7_need_not(renderers):
    greeting = [{"role": "system", "content": "S"}, HELLO, QUESTION]
    assert prompt_text(renderers["v3"], greeting) == (
        "<s>[INST][/INST] Hello</s>[INST] S\n\nHi[/INST]"
    )
    assert prompt_text(renderers["v7"], greeting) == (
        "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT] Hello</s>[INST] Hi[/INST]"
    )
    assert prompt_text(renderers["v3"], greeting[:2]) == "<s>[INST] S\n\n[/INST] Hello</s>"
    tools = renderers["v7"].create_conversation_prefix_with_tools([ToolSpec(**TOOLS[0])])
    with pytest.raises(RendererError, match="before the last question"):
        renderers["v7"].build_generation_prompt([*tools, greeting[0]])


@each_version
def test_prompts_extend_each_other_where_nothing_moves(renderers, version):
    """Not with tools, nor in v3 with a system prompt: both stand before the last question."""
    renderer = renderers[version]
    assert not renderer.has_extension_property
    turns = [QUESTION, HELLO, QUESTION, HELLO]
    system = [{"role": "system", "content": "S"}]
    tools = renderer.create_conversation_prefix_with_tools([ToolSpec(**TOOLS[0])])
    counts = [
        len(renderer.build_supervised_examples([*begin, *turns], "all_assistant_messages"))
        for begin in ([], system, tools)
    ]
    assert counts == [1, 1 if version.startswith("v7") else 2, 2]

    @checked(60)
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
    tokenizer = copy.deepcopy(stand_in("llama3", v7))
    tokenizer.chat_template = "[INST]{{ messages }}[/INST]"
    assert get_renderer("mistral", tokenizer).version == "v3_tekken", "the template counts more"


def test_a_prefill_has_the_space_of_its_version(renderers):
    assert prompt_text(renderers["v3"], [QUESTION], prefill="So") == "<s>[INST] Hi[/INST] So"
    assert prompt_text(renderers["v7_tekken"], [QUESTION], prefill="So") == "<s>[INST]Hi[/INST]So"
    assert prompt_text(renderers["v3"], [QUESTION, HELLO], role="user").endswith("</s>[INST]")


def test_pickles_by_name(stand_in):
    register_tokenizer("mistral-stand-in", stand_in)
    try:
        tokenizer = get_tokenizer("mistral-stand-in")
        renderer = get_renderer("mistral?version=v3", tokenizer)
        again = pickle.loads(pickle.dumps(renderer))
    finally:
        unregister_tokenizer("mistral-stand-in")
    assert (again.spec, again.version) == ("mistral?version=v3", "v3")
    assert tokens_of(again, [QUESTION, HELLO]) == tokens_of(renderer, [QUESTION, HELLO])


THINKING = [{"type": "thinking", "thinking": "…"}]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([result("x")], r"messages\[0\].role: got 'tool'"),
        ([QUESTION, {"role": "developer", "content": "x"}], r"messages\[1\].role: got 'developer'"),
        ([QUESTION, HELLO, {"role": "system", "content": "x"}], r"\[2\].role: got 'system' after"),
        ([QUESTION, calls("a"), QUESTION], "1 results of tools are due"),
        ([QUESTION, calls("a"), result("x"), result("y")], "0 results of tools are due"),
        ([QUESTION, calls("abcdefghi"), result("x", "other")], "'abcdefghi'"),
        ([QUESTION, HELLO, result("x")], "0 results of tools are due"),
        ([{**calls("a"), "role": "user"}], "by role 'user'"),
        ([QUESTION, {**calls("a"), "content": "x"}], "text beside tool calls"),
        ([QUESTION, HELLO, calls("a")], "text beside tool calls"),
        ([QUESTION, {"role": "assistant", "content": THINKING}], "'thinking'"),
    ],
)
def test_what_v3_cannot_write_is_refused(renderers, messages, said):
    with pytest.raises(RendererError, match=said):
        renderers["v3"].build_generation_prompt(messages)


@pytest.mark.parametrize(
    ("function", "said"),
    [({"name": "f g", "arguments": "{}"}, "rename"), ({"name": "f", "arguments": "{"}, "JSON")],
)
def test_calls_that_cannot_be_written_are_refused(renderers, function, said):
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    with pytest.raises(RendererError, match=rf"messages\[1\].tool_calls\[0\].*{said}"):
        renderers["v7"].build_supervised_example([QUESTION, message])


def test_options_and_vocabularies_that_do_not_fit_are_refused(stand_in, renderers):
    with pytest.raises(ConfigurationError, match="v3_tekken"):
        get_renderer("mistral?version=v4", stand_in())
    with pytest.raises(RendererError, match=r"\[SYSTEM_PROMPT\]"):
        get_renderer("mistral?version=v7", stand_in("llama3", V3_TOKENS))
    tool = {**TOOLS[0], "strict": True}
    with pytest.raises(RendererError, match=r"tools\[0\].*strict"):
        renderers["v7"].create_conversation_prefix_with_tools([tool])
    with pytest.raises(RendererError, match="role: got 'tool'"):
        renderers["v7"].build_generation_prompt([QUESTION], role="tool")
    assert isinstance(renderers["v3"], MistralRenderer)
