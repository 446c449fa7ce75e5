"""Nemotron 3 Ultra: Super's template with what Ultra's has otherwise.

Ultra's own file does not come with the tests; its differences from Super's are three, besides
comments: line breaks around ``</think>``, the words of the effort, and a trim before calls.
"""

from __future__ import annotations

import pytest
from families.nemotron3 import (
    SUPER,
    any_order,
    cut_conversations,
    parsed,
    tagged_answers,
    thinking_answers,
    turns,
)
from family_case import Case, Side
from hypothesis import given
from rendering_cases import checked

from tinker_cookbook.renderers import ParseTermination
from tinker_cookbook.tokenizer_utils import get_tokenizer

ULTRA = {
    '"\\n</think>\\n" ~': '"</think>" ~',
    "{reasoning effort: low}": "{reasoning effort: efficient}",
    '"<think></think>" ~ c | trim': '"<think></think>" ~ c',
}
WAYS = {
    "nemotron3_ultra": (
        any_order() | cut_conversations(turns(("none", "part", "tags"))),
        thinking_answers(),
        {},
    ),
    "nemotron3_ultra_medium_thinking": (
        any_order() | cut_conversations(turns(("none", "part", "tags"))),
        thinking_answers(),
        {"low_effort": True},  # Super's name of it
    ),
    "nemotron3_ultra_preserve_thinking": (
        cut_conversations(turns(("part", "tags"))),
        thinking_answers(),
        {"truncate_history_thinking": False},
    ),
    "nemotron3_ultra_disable_thinking": (
        cut_conversations(turns(("bare",))),
        tagged_answers(thinking=False),
        {"enable_thinking": False},
    ),
}


@pytest.mark.parametrize("spec", WAYS)
def test_tokens_equal_the_template_and_answers_are_read_back(shared_dir, tokenizer_folder, spec):
    conversations, answers, options = WAYS[spec]
    case = Case(
        model="Nemotron 3 Ultra",
        spec=spec,
        tokenizer="qwen3",
        template=SUPER,
        conversations=conversations,
        answers=answers,
        as_template=parsed,
        corrections=ULTRA,
        options=options,
    )
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    side = Side.load(case, tokenizer, shared_dir / "tokenizers", split_special_tokens=False)

    @checked(30)
    @given(messages=conversations, answer=answers)
    def check(messages, answer):
        assert side.tokens(messages) == side.expected(messages)
        assert side.prompt(messages) == side.expected(messages, prompt=True)
        sampled = side.sampled(answer)
        assert side.renderer.parse_response(sampled) == (answer, ParseTermination.STOP_SEQUENCE)
        whole, prompt = side.tokens([*case.question, answer]), side.prompt(case.question)
        assert whole[: len(prompt) + len(sampled)] == [*prompt, *sampled]

    check()
