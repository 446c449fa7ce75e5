"""Files of conversations: what is read, what is refused and in which words."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys

import pytest

from tinker_cookbook.exceptions import (
    DataFormatError,
    DataValidationError,
    TinkerCookbookError,
)
from tinker_cookbook.renderers import ToolCall, TrainOnWhat
from tinker_cookbook.supervised.conversation_file import (
    FromConversationFileBuilder,
    read_conversations,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

CALL = {"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}


def dialogue(question="Hi", answer="Hello."):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def builder(tokenizer_folder, path, family="smollm2", renderer="chatml", **settings):
    own = {
        k: settings.pop(k) for k in ("test_file_path", "test_size", "shuffle_seed") if k in settings
    }
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer_folder(family),
        renderer_name=renderer,
        **{"batch_size": 2, **settings},
    )
    return FromConversationFileBuilder(common_config=common, file_path=str(path), **own)


def decoded(dataset, tokenizer):
    data = [datum for i in range(len(dataset)) for datum in dataset.get_batch(i)]
    return [tokenizer.decode(datum.model_input.to_ints()) for datum in data]


MIXED_ROWS = [
    {"messages": dialogue()},
    {
        "messages": [
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "12:00", "tool_call_id": "1", "name": "clock"},
            {"role": "assistant", "content": "Noon.", "tool_calls": None},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Structured"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm."},
                    {"type": "text", "text": "Parts."},
                ],
            },
        ],
        "id": 3,
    },
    {
        "messages": [
            {"role": "user", "content": "Partly"},
            {"role": "assistant", "content": "No.", "trainable": False},
            {"role": "user", "content": "Go on"},
            {"role": "assistant", "content": "Yes.", "trainable": True},
        ]
    },
]


def test_rows_of_different_shapes_are_read_and_rendered(tokenizer_folder, write_jsonl):
    path = write_jsonl(*MIXED_ROWS[:3])
    rows = read_conversations(path)
    assert rows[1][1]["tool_calls"] == [ToolCall.model_validate(CALL)]
    assert rows[1][1]["content"] == ""
    assert "tool_calls" not in rows[1][3]
    made = builder(tokenizer_folder, path, family="qwen3", renderer="qwen3", batch_size=3)
    train, test = made()
    assert test is None
    text = "".join(decoded(train, made.tokenizer))
    for part in ('"name": "clock"', "12:00", "Structured", "Hm.", "Parts."):
        assert part in text


def test_untrainable_messages_are_never_trained(tokenizer_folder, write_jsonl):
    path = write_jsonl(MIXED_ROWS[3])
    for what in (TrainOnWhat.CUSTOMIZED, None, TrainOnWhat.ALL_MESSAGES):
        made = builder(tokenizer_folder, path, batch_size=1, train_on_what=what)
        (datum,) = made()[0].get_batch(0)
        mask = datum.loss_fn_inputs["weights"].to_numpy() != 0
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()[mask]
        trained = made.tokenizer.decode(targets.tolist())
        assert ("Yes." in trained, "No." in trained) == (True, False)


def test_blank_lines_byte_order_marks_line_separators_and_gzip(tmp_path):
    odd = dialogue("one\u2028two", "three\u0085four")
    text = "\ufeff" + json.dumps({"messages": odd}, ensure_ascii=False) + "\r\n\n  \n"
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(text.encode("utf-8"))
    packed.write_bytes(gzip.compress(text.encode("utf-8")))
    assert read_conversations(plain) == read_conversations(packed) == [odd]


GOOD = json.dumps({"messages": dialogue()})


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"messages": [', r"not JSON \(Expecting value at column \d+\); expected lines like"),
        ("hello", "not JSON"),
        ("[" + GOOD + ",", "looks like one JSON array: write one object per line"),
        ("[1]", "not a conversation: got a JSON list, expected an object like"),
        (
            '{"message": []}',
            "got the columns message; expected one of these layouts: .*did you mean 'messages'",
        ),
        ('{"messages": []}', "messages: got an empty list, expected a list that is not empty"),
        ('{"messages": "hi"}', "messages: got str, expected a list"),
        ('{"messages": ["hi"]}', r"messages\[0\]: got str, expected an object with role"),
        (
            json.dumps({"messages": [{"role": "user", "content": "x"}]}),
            "got messages of roles user, of which train_on_what=all_assistant_messages selects "
            "none; expected at least one",
        ),
        (
            json.dumps({"messages": [*dialogue(), {"role": "assistant", "tool_calls": [{}]}]}),
            r"messages\[2\].tool_calls\[0\]: got {}, expected",
        ),
        (
            json.dumps({"messages": dialogue(), "tools": [{"name": "clock"}]}),
            "got 'tools', which each chat format declares in its own way",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}',
            r"messages\[0\]: got 'weight', expected \"trainable\"",
        ),
    ],
)
def test_invalid_lines_are_named_by_file_and_number(write_jsonl, line, word):
    path = write_jsonl(GOOD, "", line)
    with pytest.raises(DataFormatError, match=rf"rows\.jsonl:3: .*{word}"):
        read_conversations(path)


def test_missing_empty_and_unreadable_files(tmp_path):
    with pytest.raises(DataValidationError, match=r"no\.jsonl: there is no such file \(searched"):
        read_conversations(tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataValidationError, match=r"empty\.jsonl: the file is empty; expected lin"):
        read_conversations(tmp_path / "empty.jsonl")
    with pytest.raises(DataValidationError, match=r"cannot be read: .*[Dd]irectory"):
        read_conversations(tmp_path)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 99)[:40])
    with pytest.raises(DataValidationError, match=r"cut\.jsonl\.gz: the file cannot be read"):
        read_conversations(tmp_path / "cut.jsonl.gz")


def test_the_held_out_part_is_drawn_by_seed_and_never_trained(tokenizer_folder, write_jsonl):
    path = write_jsonl(*[{"messages": dialogue(f"question {i}.")} for i in range(20)])

    def parts(seed):
        made = builder(tokenizer_folder, path, test_size=5, shuffle_seed=seed, batch_size=8)
        train, test = made()
        assert (len(train), len(test)) == (2, 1)
        texts = [decoded(part, made.tokenizer) for part in (train, test)]
        return [
            {int(re.search(r"question (\d+)\.", text)[1]) for text in part} for part in texts
        ], made

    (train, test), made = parts(3)
    assert len(test) == 5
    assert train | test == set(range(20))
    assert not train & test
    assert parts(3)[0] == [train, test] != parts(4)[0]
    prompts = made.held_out_prompts(2)
    assert len(prompts) == 2
    assert all(len(prompt) == 1 and prompt[0]["role"] == "user" for prompt in prompts)
    assert {int(re.search(r"(\d+)", prompt[0]["content"])[1]) for prompt in prompts} <= test
    assert len(made.held_out_prompts(99)) == 5


def test_a_test_file_of_its_own_and_prompts_without_the_last_answer(tokenizer_folder, write_jsonl):
    turns = [{"role": "system", "content": "Be brief."}, *dialogue("a", "b"), *dialogue("c", "d")]
    test_path = write_jsonl({"messages": turns}, name="test.jsonl")
    path = write_jsonl({"messages": dialogue()}, {"messages": dialogue("Bye", "So long.")})
    made = builder(tokenizer_folder, path, test_file_path=str(test_path))
    train, test = made()
    assert (len(train), len(test)) == (1, 1)
    assert made.held_out_prompts(3) == [turns[:-1]]
    assert builder(tokenizer_folder, path).held_out_prompts(3) == []


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"batch_size": 3}, "batch_size: got 3, expected at most 2"),
        ({"batch_size": 0}, "batch_size: got 0, expected at least 1"),
        ({"max_length": 1}, "max_length: got 1, expected at least 2 tokens"),
        ({"test_size": 2}, "test_size: got 2, expected 0 to 1"),
        ({"test_size": -1}, "test_size: got -1, expected 0 to 1"),
        ({"test_size": 1, "test_file_path": "x"}, "test_size: got 1 and test_file_path=x"),
        ({"renderer": "qwen33"}, "qwen33.*did you mean 'qwen3'"),
    ],
)
def test_invalid_settings_are_refused(tokenizer_folder, write_jsonl, settings, word):
    path = write_jsonl({"messages": dialogue()}, {"messages": dialogue()})
    with pytest.raises(TinkerCookbookError, match=word):
        builder(tokenizer_folder, path, **settings)()


def test_importing_loads_no_heavy_library():
    code = (
        "import sys, tinker_cookbook.supervised.conversation_file\n"
        "import tinker_cookbook.supervised.hf_datasets, tinker_cookbook.supervised.hf_datasets\n"
        "import tinker_cookbook.supervised.nll_evaluator, tinker_cookbook.supervised.prefetch\n"
        "heavy = {'torch', 'transformers', 'datasets', 'tinker', 'pyarrow', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert done.stdout.strip() == "[]", done.stderr
