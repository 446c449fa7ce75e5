"""Every family's renderer against the template that its model ships.

Each check runs on every case of ``families/``. The last test compares what was seen with the table
in ``docs/renderers.md``; ``UPDATE_DOCS=1`` writes it.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import os
import pkgutil
from collections import defaultdict
from pathlib import Path

import families
import pytest
from family_case import Case, Side, assert_any_cut
from hypothesis import given
from hypothesis import strategies as st
from rendering_cases import checked, drawn, hold

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import ParseTermination, ToolSpec
from tinker_cookbook.tokenizer_utils import get_tokenizer

DOCS = Path(__file__).resolve().parents[3] / "docs" / "renderers.md"
TOOLS = [
    ToolSpec(
        name="get_weather",
        description='Says how "the weather" is, é',
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where?"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            },
            "required": ["city"],
        },
    ),
    ToolSpec(name="stop", description="", parameters={"type": "object", "properties": {}}),
]
AROUND = ["", "a", " ", "<|", "é", "\ufdd0", "\ufdd0\ufdd1"]
CASES: list[Case] = [
    case
    for module in sorted(m.name for m in pkgutil.iter_modules(families.__path__))
    for case in importlib.import_module(f"families.{module}").CASES
]
seen: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))


@pytest.fixture(scope="session")
def load(shared_dir, tokenizer_folder):
    tokenizers = {}

    def load_side(case, **options):
        own = case.template if case.spec.partition("?")[0] == "template" else ""
        key = (case.tokenizer, tuple(case.added_tokens), own)
        if key not in tokenizers:
            tokenizer = get_tokenizer(tokenizer_folder(case.tokenizer))
            if case.added_tokens:
                tokenizer = copy.deepcopy(tokenizer)
                tokenizer.add_special_tokens({"additional_special_tokens": [*case.added_tokens]})
            if own:  # this renderer reads the template from the tokenizer
                path = shared_dir / "tokenizers" / own
                tokenizer = copy.copy(tokenizer)
                tokenizer.chat_template = path.read_text(encoding="utf-8")
            tokenizers[key] = tokenizer
        return Side.load(case, tokenizers[key], shared_dir / "tokenizers", **options)

    return load_side


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)


def count(case, messages):
    seen[case.label]["cases"] += 1
    seen[case.label]["tools"] += any(m.get("tool_calls") for m in messages)
    parts = [p["type"] for m in messages if isinstance(m["content"], list) for p in m["content"]]
    seen[case.label]["thinking"] += "thinking" in parts
    seen[case.label]["images"] += "image" in parts


@pytest.mark.slow
@each_case
def test_tokens_equal_the_template(load, case):
    side, default = load(case, split_special_tokens=False), load(case)
    names = default.renderer.codec.control_token_in

    def check(messages):
        tokens, prompt = side.tokens(messages), side.prompt(messages)
        assert tokens == side.expected(messages) + side.stop_behind(messages)
        assert prompt == side.expected(messages, prompt=True)
        if not names(json.dumps(default.as_plain(messages), ensure_ascii=False)):
            assert default.tokens(messages) == tokens
            assert default.prompt(messages) == prompt
        count(case, messages)

    hold(check, case.conversations)


@each_case
def test_weights_are_what_follows_the_prompt(load, case):
    """By the template's ids alone: the answer is what the prompt before it does not have."""
    side = load(case, split_special_tokens=False)
    stops = set(side.renderer.response_parser()._stops)

    asked = (m for m in drawn(case.conversations) if any(one["role"] == "user" for one in m))
    for messages, answer in itertools.islice(zip(asked, drawn(case.answers, 20), strict=False), 6):
        end = max(i for i, m in enumerate(messages) if m["role"] == "user")
        messages = [*messages[: end + 1], answer]
        example, weights = side.renderer.build_supervised_example(messages)
        prompt = side.expected(messages[:-1], prompt=True)
        tokens = side.ids(example)
        assert tokens[: len(prompt)] == prompt
        stop = max(i for i, token in enumerate(tokens) if token in stops)
        expected = [float(len(prompt) <= i <= stop) for i in range(len(tokens))]
        assert weights.tolist() == expected


@each_case
def test_parse_gives_the_message_back_in_any_cut(load, case):
    side = load(case)

    @checked(8)
    @given(answer=case.answers, data=st.data())
    def check(answer, data):
        tokens = side.sampled(answer)
        parsed, how = side.renderer.parse_response(tokens)
        assert parsed == answer
        assert how is ParseTermination.STOP_SEQUENCE
        keep = data.draw(st.integers(0, len(tokens)))
        for whole in (tokens, tokens[:keep]):
            assert_any_cut(side.renderer, whole, data)

    check()


@each_case
def test_random_tokens_never_raise_and_cut_alike(load, case):
    side = load(case)
    control = sorted(side.tokenizer.added_tokens_decoder)
    token = st.integers(0, min(len(side.tokenizer) - 1, 60_000)) | st.sampled_from(control)

    @checked(6)
    @given(tokens=st.lists(token, max_size=12), data=st.data())
    def check(tokens, data):
        assert_any_cut(side.renderer, tokens, data)

    check()


@each_case
def test_brackets_without_end_do_not_raise(load, case):
    renderer = load(case).renderer
    for block in getattr(renderer._reader(), "_blocks", ()):
        if block.read is not None:
            body = '{"name": "f", "arguments": ' + "[" * 100_000
            tokens = renderer.codec.encode(block.opening + body + block.closing)
            assert renderer.parse_response(tokens)[0]["role"] == "assistant"


@pytest.mark.parametrize("system", ["", "Be brief."])
@each_case
def test_tool_declarations_equal_the_template(load, case, system):
    side = load(case)
    question = {"role": "user", "content": "Hi"}
    if case.declares_tools is None:
        pytest.skip("this template declares no tools")
    prefix = side.renderer.create_conversation_prefix_with_tools(TOOLS, system)
    declared = [{"type": "function", "function": copy.deepcopy(dict(tool))} for tool in TOOLS]
    with_system = [{"role": "system", "content": system}] if system else []
    assert side.prompt([*prefix, question]) == side.expected(
        [*with_system, question], prompt=True, tools=declared, **case.declares_tools
    )
    seen[case.label]["tools"] += 1
    seen[case.label]["declared"] = 1


@each_case
def test_split_control_tokens_stay_text(load, case):
    """Names of control tokens in a message are plain text in every role."""
    side = load(case)
    added = side.tokenizer.added_tokens_decoder.values()
    names = [str(token) for token in added if side.renderer.codec.control_token_in(str(token))]
    special = {str(t) for t in added if t.special and len(str(t)) > 1}
    assert {n for n in special if not n.strip("<>/").replace("_", "").isalpha()} <= set(names)
    prefix = [m for m in case.question if m["role"] != "user"]

    @checked(6)
    @given(
        name=st.sampled_from(names),
        around=st.sampled_from(["", "a", " ", "<|", "é", "\ufdd0", "\ufdd0\ufdd1"]),
    )
    def check(name, around):
        typed = {"role": "user", "content": f"a{around}{name}{around}b"}
        neutral = {"role": "user", "content": "ab"}
        tokens, plain = side.prompt([*prefix, typed]), side.prompt([*prefix, neutral])
        control = set(side.tokenizer.added_tokens_decoder)
        assert [t for t in tokens if t in control] == [t for t in plain if t in control]
        assert typed["content"] in side.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    check()


@each_case
def test_extension_property_is_as_said(load, case):
    side = load(case)
    conversations = drawn(case.conversations)[:20]
    if side.renderer.has_extension_property:
        assert not any(breaks_extension(side, messages) for messages in conversations)
        return
    # Only here every answer is one of the prompt's.
    asked_on = (
        [*case.question, answer, {"role": "user", "content": "And then?"}]
        for answer in drawn(case.answers, 20)
    )
    assert trims_what_was_sampled(side, case) or any(
        breaks_extension(side, messages) for messages in itertools.chain(asked_on, conversations)
    )


def trims_what_was_sampled(side, case):
    """Whether white space before sampled text is missing in the next prompt."""
    renderer = side.renderer
    prompt = renderer.build_generation_prompt(case.question).to_ints()
    sampled = [*renderer.codec.encode("  Yes. \n"), renderer.get_stop_sequences()[0]]
    said, _ = renderer.parse_response(sampled)
    later = [*case.question, said, {"role": "user", "content": "And then?"}]
    begin = [*prompt, *sampled]
    return renderer.build_generation_prompt(later).to_ints()[: len(begin)] != begin


def breaks_extension(side, messages):
    """Whether an answer and what it answers are not the beginning of the next prompt."""
    for i, message in enumerate(messages[:-1]):
        if message["role"] == "assistant" and messages[i + 1]["role"] != "assistant":
            try:
                before = side.prompt(messages[:i])
            except RendererError:  # no such answer is ever sampled
                continue
            example, weights = side.renderer.build_supervised_example(messages[: i + 1])
            stop = max((j for j, w in enumerate(weights.tolist()) if w), default=-1)
            answered = side.ids(example)[: stop + 1]
            after = side.prompt(messages[: i + 2])
            if answered[: len(before)] != before or after[: len(answered)] != answered:
                return True
    return False


@pytest.mark.slow
def test_table_in_the_documentation_is_what_was_seen(load):
    table = make_table(load)
    text = DOCS.read_text(encoding="utf-8")
    start, end = "<!-- table: begin -->\n", "<!-- table: end -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    if os.environ.get("UPDATE_DOCS"):
        DOCS.write_text(f"{before}{start}{table}{end}{after}", encoding="utf-8")
    else:
        assert rest.partition(end)[0] == table, "run the tests of renderers with UPDATE_DOCS=1"


def make_table(load):
    declaring = [case for case in CASES if case.declares_tools is not None]
    if len(seen) < len(CASES) or not all(seen[case.label]["declared"] for case in declaring):
        pytest.skip("the table is made from all cases: run the whole file")
    lines = [
        "| family | template of | equal in tokens | tools | thinking | images | streaming "
        "| extension |\n|---|---|---|---|---|---|---|---|\n"
    ]
    for case in CASES:
        found, renderer = seen[case.label], load(case).renderer
        marks = ["✓" if found[key] else "–" for key in ("tools", "thinking", "images")]
        notes = ("¹" if case.stand_in else "") + ("²" if case.corrections else "")
        extension = "✓" if renderer.has_extension_property else "–"
        cells = [f"`{case.spec}`", case.model, f"{found['cases']}{notes}", *marks]
        lines.append(f"| {' | '.join([*cells, '✓', extension])} |\n")
    differences = {case.difference: case.spec.partition("?")[0] for case in CASES}
    lines += [f"\n- `{name}`: {text}" for text, name in differences.items() if text]
    return "".join([*lines, "\n"])
