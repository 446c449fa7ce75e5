"""Data as other programs write it: roles, tools next to messages, other file formats."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys

import pytest
from test_conversation_files import CALL, builder, decoded, dialogue

from tinker_cookbook.exceptions import DataError, DataFormatError, DataValidationError
from tinker_cookbook.preference.comparison_file import comparison_of_row
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.supervised.conversation_file import (
    chat_dataset,
    read_conversation,
    read_conversations,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
TALK = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Noon."},
]


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "hint"),
    [
        ("human", "did you mean 'user'"),
        ("gpt", "did you mean 'assistant'"),
        ("Bot", "did you mean 'assistant'"),
        ("usr", "did you mean 'user'"),
        ("function", "did you mean 'tool'"),
        ("narrator", "expected one of system, user, assistant, tool, developer"),
    ],
)
def test_an_unknown_role_is_refused_with_its_line(write_jsonl, role, hint):
    row = {"messages": [{"role": role, "content": "x"}, *dialogue()]}
    path = write_jsonl({"messages": dialogue()}, row)
    for read in (read_conversations, lambda file: read_conversation(file, 1)):
        with pytest.raises(DataFormatError, match=rf"rows\.jsonl:2: .*role: got '{role}'.*{hint}"):
            read(path)


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_roles_that_chat_formats_have_pass(write_jsonl, role):
    path = write_jsonl({"messages": [{"role": role, "content": "x"}, *dialogue()]})
    assert read_conversations(path)[0][0]["role"] == role


def test_unknown_roles_in_rows_of_a_hub_dataset_and_in_pairs(tokenizer_folder, write_jsonl):
    bad = [{"role": "human", "content": "x"}, {"role": "assistant", "content": "y"}]
    made = builder(tokenizer_folder, write_jsonl({"messages": dialogue()}))
    dataset = chat_dataset(made, [{"messages": bad}], 1, "messages")
    with pytest.raises(DataError, match=r"row 0 .*got 'human'.*did you mean 'user'"):
        dataset.get_batch(0)
    with pytest.raises(DataFormatError, match=r"prompt: .*got 'human'.*did you mean 'user'"):
        comparison_of_row({"prompt": bad[:1], "chosen": "a", "rejected": "b"})


# --- tools next to messages ----------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, "You are brief."])
@pytest.mark.parametrize("form", ["openai", "flat", "text"])
def test_tools_are_declared_as_the_chat_format_does_it(tokenizer_folder, write_jsonl, system, form):
    tools = {"openai": [TOOL], "flat": [TOOL["function"]], "text": json.dumps([TOOL])}[form]
    begin = [{"role": "system", "content": system}] if system else []
    path = write_jsonl({"messages": [*begin, *TALK], "tools": tools})
    last = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    made = builder(
        tokenizer_folder, path, family="qwen3", renderer="qwen3", batch_size=1, train_on_what=last
    )
    renderer = made.renderer
    expected = renderer.build_supervised_example(
        [*renderer.create_conversation_prefix_with_tools([TOOL["function"]], system or ""), *TALK],
        last,
    )[0].to_ints()
    (text,) = decoded(made()[0], made.tokenizer)
    assert text == made.tokenizer.decode(expected[:-1])
    assert "Tells the time." in text
    # And as the model's own template does it.
    question = [*begin, TALK[0]]
    template = made.tokenizer.apply_chat_template(question, tools=[TOOL], tokenize=False)
    assert str(text).startswith(str(template))


def test_tools_of_a_hub_datasets_row(tokenizer_folder, write_jsonl):
    made = builder(
        tokenizer_folder, write_jsonl({"messages": dialogue()}), family="qwen3", renderer="qwen3"
    )
    dataset = chat_dataset(made, [{"messages": TALK, "tools": [TOOL]}], 1, "messages")
    assert "Tells the time." in decoded(dataset, made.tokenizer)[0]


def test_the_mark_of_what_is_trained_stays_whole(tokenizer_folder, write_jsonl):
    marked = [{**m, "trainable": m["role"] == "assistant"} for m in TALK]
    path = write_jsonl({"messages": marked, "tools": [TOOL]})
    renderer = get_renderer("qwen3", get_tokenizer(tokenizer_folder("qwen3")))
    (messages,) = read_conversations(path, TrainOnWhat.CUSTOMIZED, lambda: renderer)
    assert [m.get("trainable") for m in messages] == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("tools", "word"),
    [
        ([TOOL], "tools: .*declares no tools; use a renderer with tools"),
        ([{"type": "web_search", "function": {"name": "x"}}], r"tools\[0\].type: got 'web_search'"),
        ([{"description": "x"}], r"tools\[0\]: got .*expected .*\"function\""),
        ("not json", "tools: got a text that is not JSON"),
        ({"clock": {}}, "tools: got dict, expected a list"),
    ],
)
def test_tools_that_cannot_be_declared(tokenizer_folder, write_jsonl, tools, word):
    path = write_jsonl({"messages": dialogue()}, {"messages": TALK, "tools": tools})
    made = builder(tokenizer_folder, path, renderer="role_colon")
    with pytest.raises(DataFormatError, match=rf"dataset_path: .*rows\.jsonl:2: {word}"):
        made()


def test_functions_of_the_older_form_are_refused(write_jsonl):
    path = write_jsonl({"messages": dialogue(), "functions": [TOOL["function"]]})
    with pytest.raises(DataFormatError, match="got 'functions', expected 'tools'"):
        read_conversations(path)


# --- other file formats: named, with a command that converts them --------------------------------


def convert(error: BaseException, folder) -> None:
    """Runs the command that an error gives."""
    command = re.search(r"python -c '.*'", str(error))
    assert command is not None
    subprocess.run(
        command[0].replace("python", sys.executable, 1), shell=True, check=True, cwd=folder
    )


ROWS = [
    (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        "ShareGPT",
    ),
    ({"prompt": "Hi", "completion": "Hello."}, "prompts and completions"),
    ({"instruction": "Hi", "input": "", "output": "Hello."}, "Alpaca"),
]


@pytest.mark.parametrize(("row", "name"), ROWS, ids=[name for _, name in ROWS])
def test_rows_of_other_formats(write_jsonl, tmp_path, row, name):
    path = write_jsonl(row)
    with pytest.raises(DataFormatError, match=name) as refused:
        read_conversations(path)
    convert(refused.value, tmp_path)
    (made,) = tmp_path.glob("*.messages.jsonl")
    assert read_conversations(made) == [dialogue()]


def test_a_json_list(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"messages": dialogue()}] * 2, indent=1))
    with pytest.raises(DataFormatError, match="got a JSON list, expected JSON lines") as refused:
        read_conversations(path)
    convert(refused.value, tmp_path)
    assert read_conversations(tmp_path / "rows.jsonl") == [dialogue()] * 2


def test_parquet(tmp_path):
    import datasets

    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"messages": dialogue()}]).to_parquet(path)
    with pytest.raises(DataFormatError, match="got a parquet file") as refused:
        read_conversations(path)
    convert(refused.value, tmp_path)
    assert read_conversations(tmp_path / "rows.jsonl") == [dialogue()]


def test_csv(tmp_path):
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(
            [("COLUMN OF THE QUESTION", "COLUMN OF THE ANSWER"), ("Hi", "Hello.")]
        )
    with pytest.raises(DataFormatError, match="got a CSV file") as refused:
        read_conversations(path)
    convert(refused.value, tmp_path)
    assert read_conversations(tmp_path / "rows.jsonl") == [dialogue()]


def test_an_address_is_shown_as_it_was_given():
    with pytest.raises(DataValidationError, match=r"got https://example\.com/a\.jsonl, which is"):
        read_conversations("https://example.com/a.jsonl")
