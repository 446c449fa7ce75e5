"""Data as other programs write it: roles, tools next to messages, other file formats."""

from __future__ import annotations

import csv
import json

import pytest
from test_conversation_files import CALL, builder, decoded, dialogue

from tinker_cookbook.exceptions import (
    DataError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.conversation_file import (
    read_conversation,
    read_conversations,
)
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

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


# --- other file formats and layouts --------------------------------------------------------------


def test_what_precedes_a_question(write_jsonl):
    row = {
        "system": "Be brief.",
        "history": [["One?", "1"]],
        "instruction": "Add.",
        "input": "1+1",
        "output": "2",
    }
    (messages,) = read_conversations(write_jsonl(row))
    # A CSV file has the history as JSON.
    as_text = {**row, "history": json.dumps(row["history"])}
    assert read_conversations(write_jsonl(as_text)) == [messages]
    with pytest.raises(DataError, match=r"history: got .*One.*, expected pairs"):
        read_conversations(write_jsonl({**row, "history": json.dumps("One")}))
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "1"),
        ("user", "Add.\n\n1+1"),
        ("assistant", "2"),
    ]


@pytest.mark.parametrize(
    "name", ["rows.json", "rows.csv", "rows.tsv", "rows.parquet", "lines.json"]
)
def test_file_formats(tmp_path, name):
    import datasets

    rows = [{"question": "Hi, you\nthere", "answer": 'He said "\tHello".'}] * 2
    path = tmp_path / name
    if name == "rows.json":
        path.write_text(json.dumps(rows, indent=1))
    elif name == "lines.json":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="," if name == "rows.csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    assert read_conversations(path) == [dialogue("Hi, you\nthere", 'He said "\tHello".')] * 2


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (
            [{"text": "x"}],
            "rows.jsonl:1: .*got the columns text; expected one of these layouts",
        ),
        (
            [{"prompt": "a", "completion": "b", "question": "c", "answer": "d"}],
            "of which prompt/completion and question/answer are questions and answers; expected",
        ),
        (
            [{"instruction": "Hi", "output": "Ho"}, {"prompt": "Hi", "completion": "Ho"}],
            r":2: .*columns prompt, completion \(prompt/completion layout\), but earlier rows have "
            r"instruction, output \(Alpaca layout\); expected one layout",
        ),
        ([{"conversations": [], "chosen": "a", "rejected": "b"}], "pairs of a better and a worse"),
        ([{"conversations": [{"from": "humn", "value": "x"}]}], "got 'humn'.*did you mean 'human'"),
        ([{"conversations": [{"from": "human"}]}], r"\[0\]: got from, expected an object with fro"),
        (
            [{"conversations": [{"from": "function_call", "value": "no"}]}],
            r"conversations\[0\].value: got a text that is not JSON",
        ),
        ([{"question": "Which?", "answer": 3}], "answer: got 3, expected a text or a list of mess"),
        (
            [{"messages": dialogue("<image>"), "images": ["a.png", "b.png"]}],
            "images: got 2 images and 1 marks <image>",
        ),
    ],
)
def test_layouts_that_are_refused(write_jsonl, rows, word):
    with pytest.raises(DataFormatError, match=word):
        read_conversations(write_jsonl(*rows))


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("question,answer\na,b\nc,d,e\n", ":3: got another number of cells"),
        (
            'question,answer\na,b\nc,"5 inches\nd,e\nf,"6 inches\n',
            ":3: the row that begins here has",
        ),
        ('question,answer\n"Hello," she said.,b\n', ":2: the row that begins here has a wrong q"),
        ('question,answer\na,"b\n', ":2: the row that begins here has a wrong quote"),
        ("question,answer,answer\na,b,c\n", ":1: got a column twice in question, answer, answer"),
        ("question;answer\na;b\n", ":1: got one column 'question;answer'; are the cells sep"),
        ("What is it?,A thing.\nWho,I\n", "the first line of a CSV or TSV file must name the col"),
    ],
)
def test_tables_of_text_are_read_strictly(tmp_path, kind, text, word):
    path = tmp_path / f"rows.{kind}"
    path.write_text(text if kind == "csv" else text.replace(",", "\t"))
    # Python's strict reader refuses the same quotes.
    if "quote" in word or "begins" in word:
        with path.open(newline="") as file, pytest.raises(csv.Error):
            list(csv.reader(file, delimiter="," if kind == "csv" else "\t", strict=True))
    with pytest.raises(DataFormatError, match=word):
        read_conversations(path)


def test_json_inside_of_parquet_and_folders_of_save_to_disk(tmp_path, tokenizer_folder, capsys):
    import datasets

    call = {"function": {"name": "clock", "arguments": {"zone": None}}}
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    # Rows of JSON, as datasets reads them: their nulls are the user's.
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    table = datasets.Dataset.from_list([{"messages": talk}], features=features)
    table.to_parquet(tmp_path / "a.parquet")
    for rows in (
        read_conversations(tmp_path / "a.parquet"),
        load(tokenizer_folder, tmp_path / "a.parquet")[1].hf_dataset,
    ):
        assert rows[0][1]["tool_calls"][0].function.arguments == '{"zone": null}'
    table.save_to_disk(tmp_path / "saved")
    with pytest.raises(DataValidationError, match=r"saved: the folder was written by save_to_disk"):
        load(tokenizer_folder, tmp_path / "saved")


# --- real files ----------------------------------------------------------------------------------


def load(tokenizer_folder, path, **settings):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer_folder("qwen3"), renderer_name="qwen3", batch_size=1
    )
    made = ChatDataBuilder(common_config=common, file_path=str(path), **settings)
    return made, *made()


def test_calls_and_results_of_sharegpt(shared_dir, tokenizer_folder, capsys):
    path = shared_dir / "data" / "llamafactory_demo" / "glaive_toolcall_en_demo.json"
    made, train, _ = load(tokenizer_folder, path)
    assert "300 rows, ShareGPT layout, columns conversations, tools" in capsys.readouterr().out
    rows = json.loads(path.read_text())
    for i, row in enumerate(rows):
        turns, messages = row["conversations"], train.hf_dataset[i]
        # The declaration of the tools is one message more.
        declared = bool(json.loads(row["tools"]))
        assert len(messages) == len(turns) + declared
        for turn, message in zip(turns, messages[declared:], strict=True):
            if turn["from"] == "function_call":
                (call,) = message["tool_calls"]
                value = json.loads(turn["value"])
                assert call.function.name == value["name"]
                assert json.loads(call.function.arguments) == value["arguments"]
            else:
                assert message["content"] == turn["value"]
    # Qwen3 needs several datums, because it drops the thinking of earlier turns.
    text = made.tokenizer.decode(train.get_batch(0)[-1].model_input.to_ints())
    assert '<tool_call>\n{"name": "search_recipes"' in text
    assert "<tool_response>" in text


# --- labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_rows_with_label_false_are_left_out_and_counted(tmp_path, tokenizer_folder, capsys, kind):
    rows = [{"prompt": f"{i}?", "completion": f"{i}.", "label": i % 3 != 0} for i in range(7)]
    path = tmp_path / f"kto.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "csv":
        with path.open("w") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer_folder("smollm2"), renderer_name="chatml", batch_size=2
    )
    train, test = ChatDataBuilder(common_config=common, file_path=str(path), test_size=1)()
    kept = [part.hf_dataset[i] for part in (train, test) for i in range(len(part.hf_dataset))]
    assert sorted(talk[1]["content"] for talk in kept) == ["1.", "2.", "4.", "5."]
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "4 rows, prompt/completion layout, columns prompt, completion, label; 3 rows with" in (
        printed
    )
