"""What is in a row reaches the tokens, or the row is refused: each part, layout and source."""

from __future__ import annotations

import csv
import json

import pytest
from test_conversation_files import dialogue

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonBuilderFromJsonl,
)
from tinker_cookbook.supervised import hf_datasets
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.mixtures import HFDatasetSource, InterleavedChatDatasetBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

FILES = ("jsonl", "json", "csv", "tsv", "parquet")
SOURCES = (*FILES, "hub", "mixture of jsonl", "mixture of parquet", "mixture of two tables")


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **parameters):
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    function = {"name": name, "description": f"The {name}.", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", city={"type": "string"})]
OTHER_TOOLS = [tool("add", a={"type": "integer"}, b={"type": "integer", "minimum": 0})]
HI = {"role": "user", "content": "Hi"}
BYE = {"role": "assistant", "content": "Bye."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [call("weather", {"city": "Paris"})]}
THOUGHT = {**BYE, "reasoning_content": "So."}
SYSTEM = {"role": "system", "content": "Be kind."}


def sharegpt(*turns, **others):
    return [{"from": who, "value": text, **others} for who, text in turns]


# The row, and what the chat template of the model gets.
READ = {
    "calls": ({"messages": [HI, CALLS]}, [HI, CALLS]),
    "calls as text": (
        {"messages": [HI, {**CALLS, "tool_calls": json.dumps(CALLS["tool_calls"])}]},
        [HI, CALLS],
    ),
    "no content": ({"messages": [HI, {**CALLS, "content": None}]}, [HI, CALLS]),
    "tools": ({"messages": [HI, CALLS], "tools": TOOLS}, [HI, CALLS], TOOLS),
    "tools as text": ({"messages": [HI, BYE], "tools": json.dumps(TOOLS)}, [HI, BYE], TOOLS),
    "tool_defs": ({"messages": [HI, BYE], "tool_defs": TOOLS}, [HI, BYE], TOOLS),
    "tools of the system": (
        {"messages": [{**SYSTEM, "tools": TOOLS}, HI, BYE]},
        [SYSTEM, HI, BYE],
        TOOLS,
    ),
    "empty tools": ({"messages": [HI, BYE], "tools": ""}, [HI, BYE]),
    "system column": ({"messages": [HI, BYE], "system_prompt": "Be kind."}, [SYSTEM, HI, BYE]),
    **{
        f"reasoning as {name}": ({"messages": [HI, {**BYE, name: "So."}]}, [HI, THOUGHT])
        for name in ("reasoning_content", "reasoning", "thinking")
    },
    "ShareGPT": (
        {"conversations": sharegpt(("human", "Hi"), ("gpt", "Bye.")), "system": "Be kind."},
        [SYSTEM, HI, BYE],
    ),
    "ShareGPT in messages": ({"messages": sharegpt(("human", "Hi"), ("gpt", "Bye."))}, [HI, BYE]),
    "ShareGPT reasoning": (
        {"conversations": [*sharegpt(("human", "Hi")), *sharegpt(("gpt", "Bye."), thinking="So.")]},
        [HI, THOUGHT],
    ),
    "ShareGPT call": (
        {
            "conversations": sharegpt(
                ("human", "Hi"),
                ("function_call", '{"name": "weather", "arguments": {"city": "Paris"}}'),
            ),
            "tools": json.dumps(TOOLS),
        },
        [HI, CALLS],
        TOOLS,
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1+1", "output": "2"},
        dialogue("Add.\n\n1+1", "2"),
    ),
    "Alpaca, only input": (
        {"instruction": "", "input": "1+1", "output": "2"},
        dialogue("1+1", "2"),
    ),
    "context": ({"question": "Who?", "context": "I.", "answer": "I"}, dialogue("Who?\n\nI.", "I")),
    "history": (
        {"query": "Hi", "response": "Bye.", "history": [["a", "b"]], "system": "Be kind."},
        [SYSTEM, *dialogue("a", "b"), HI, BYE],
    ),
    "reasoning column": (
        {"question": "Hi", "reasoning": "So.", "answer": "Bye."},
        [HI, THOUGHT],
    ),
    "lists": ({"prompt": [SYSTEM, HI], "completion": [THOUGHT]}, [SYSTEM, HI, THOUGHT]),
    "tools of a prompt": (
        {"prompt": "Hi", "completion": [CALLS], "tools": TOOLS},
        [HI, CALLS],
        TOOLS,
    ),
    "a null that is meant": (
        {"messages": json.dumps([HI, {**CALLS, "tool_calls": [call("weather", {"city": None})]}])},
        [HI, {**CALLS, "tool_calls": [call("weather", {"city": None})]}],
    ),
}

PAIR = {"prompt": "Hi", "chosen": "Bye.", "rejected": "Go."}
GO = {"role": "assistant", "content": "Go."}
EARLIER = dialogue("a", "b")
# The row, and the conversations with the chosen and with the rejected answer.
PAIRS = {
    "texts": (PAIR, [HI], BYE, GO),
    "context": (
        {**PAIR, "system": "Be kind.", "history": [["a", "b"]]},
        [SYSTEM, *EARLIER, HI],
        BYE,
        GO,
    ),
    "calls": (
        {**PAIR, "chosen": [CALLS], "rejected": [GO], "tools": TOOLS},
        [HI],
        CALLS,
        GO,
        TOOLS,
    ),
    "tools as text": ({**PAIR, "tools": json.dumps(TOOLS)}, [HI], BYE, GO, TOOLS),
    "reasoning": (
        {**PAIR, "chosen": [{**BYE, "thinking": "So."}], "rejected": [GO]},
        [HI],
        THOUGHT,
        GO,
    ),
    "question": (
        {"question": "Hi", "system": "Be kind.", "chosen": "Bye.", "rejected": "Go."},
        [SYSTEM, HI],
        BYE,
        GO,
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1+1", "chosen": "Bye.", "rejected": "Go."},
        dialogue("Add.\n\n1+1")[:1],
        BYE,
        GO,
    ),
    "ShareGPT": (
        {
            "conversations": sharegpt(("human", "Hi")),
            "chosen": sharegpt(("gpt", "Bye.")),
            "rejected": sharegpt(("gpt", "Go.")),
        },
        [HI],
        BYE,
        GO,
    ),
    **{
        f"repeated {name}": (
            {**row, "chosen": [*begin, BYE], "rejected": [*begin, GO]},
            expected,
            BYE,
            GO,
        )
        for name, row, begin, expected in (
            ("prompt", {"prompt": "Hi"}, [HI], [HI]),
            ("prompt and a system message", {"prompt": "Hi"}, [SYSTEM, HI], [SYSTEM, HI]),
            ("prompt after system", {"prompt": "Hi", "system": "Be kind."}, [HI], [SYSTEM, HI]),
            ("prompt with a line break", {"prompt": "Hi\n"}, [HI], [HI]),
            ("last question", {"prompt": "Hi"}, [*EARLIER, HI], [*EARLIER, HI]),
            ("conversation", {}, [*EARLIER, HI], [*EARLIER, HI]),
        )
    },
}

REFUSED = {
    "weight": ({"messages": [HI, {**BYE, "weight": 0}]}, "got 'weight', expected \"trainable\""),
    "loss": ({"messages": [HI, {**BYE, "loss": False}]}, "got 'loss', expected \"trainable\""),
    "ignore": ({"messages": [HI, {**BYE, "ignore": True}]}, "got 'ignore', expected \"trainable"),
    "analysis": ({"messages": [HI, {**BYE, "analysis": "It is a greeting."}]}, "got 'analysis'"),
    "train": (
        {"conversations": sharegpt(("human", "Hi"), ("gpt", "Bye."), train=False)},
        "got 'train', expected \"trainable\"",
    ),
    "loss_mask": ({"messages": [HI, BYE], "loss_mask": [0, 1]}, "loss_mask: got .*no weights"),
    "weight of a row": ({"messages": [HI, BYE], "weight": 0.5}, "weight: got .*0.5.*no weights"),
    "train of a row": ({"messages": [HI, BYE], "train": False}, "train: got .*no weights"),
    "a repeated prompt": (
        {"prompt": "Hi", "completion": [HI, BYE]},
        "completion: got a message of role 'user' first",
    ),
    "function_call": (
        {"messages": [HI, {**BYE, "function_call": {"name": "f"}}]},
        "got 'function_call', expected \"tool_calls\"",
    ),
    "images": (
        {"messages": [{**HI, "images": ["a.png"]}, BYE]},
        "'images', expected a part of the",
    ),
    "images of a row": (
        {"messages": [{**HI, "content": "<image> or <image>?"}, BYE], "images": ["a.png"]},
        "images: got 1 images and 2 marks",
    ),
    "late tools": ({"messages": [HI, {**BYE, "tools": TOOLS}]}, "got 'tools', expected the tools"),
    "misspelt key": ({"messages": [HI, {**BYE, "tool_call": "x"}]}, "did you mean 'tool_calls'"),
    "misspelt column": (
        {"instruction": "a", "inputs": "b", "output": "c"},
        "'inputs', which is not read; did you mean 'input'",
    ),
    "history": (
        {"messages": [HI, BYE], "history": [["a", "b"]]},
        "history: .*expected it in the me",
    ),
    "null": (
        {"conversations": [*sharegpt(("human", "Hi")), {"from": "gpt", "value": None}]},
        r"\[1\]: got .*from.*, expected an object with from and value",
    ),
    "two reasonings": (
        {"messages": [HI, {**BYE, "thinking": "a", "reasoning": "b"}]},
        "got another text than in the message's other keys",
    ),
    "input and context": (
        {"instruction": "a", "input": "b", "context": "c", "output": "d"},
        "texts in input and context, expected one",
    ),
    "two systems": (
        {"messages": [SYSTEM, HI, BYE], "system": "Be rude."},
        "another system message",
    ),
    "two lists of tools": (
        {"messages": [HI, BYE], "tools": TOOLS, "tool_defs": json.dumps(OTHER_TOOLS)},
        "got different tools in two places",
    ),
}

REFUSED_PAIRS = {
    "weight": ({**PAIR, "chosen": [{**BYE, "weight": 0}]}, "chosen: .*got 'weight', expected"),
    "trainable": ({**PAIR, "chosen": [{**BYE, "trainable": False}]}, "got trainable: false"),
    "weight of a row": ({**PAIR, "weight": 0.5}, "weight: got .*no weights"),
    "images": ({**PAIR, "images": ["a.png"], "image": "a.png"}, "columns images and image"),
    "reasoning column": ({**PAIR, "thinking": "So."}, "thinking: got reasoning in a column"),
    "misspelt": ({**PAIR, "sytem": "Be kind."}, "did you mean 'system'"),
    "history column": (
        {"chosen": [HI, BYE], "rejected": [HI, GO], "history": [["a", "b"]]},
        "history:",
    ),
    "another question": (
        {
            **PAIR,
            "chosen": [{**HI, "content": "Ho"}, BYE],
            "rejected": [{**HI, "content": "Ho"}, GO],
        },
        "do not repeat the prompt",
    ),
    "a question in one": ({**PAIR, "chosen": [HI, BYE]}, "do not repeat the prompt"),
}


def filler(row):
    """A row with the same columns and other members, so that Arrow invents nulls."""
    calls = [call("add", {"a": 1, "b": 2})]
    as_text = '"tool_calls": "' in json.dumps(row)
    talk = [HI, {**BYE, "mood": None, "tool_calls": json.dumps(calls) if as_text else calls}]
    made = {}
    for name, value in row.items():
        is_list = isinstance(value, list) and value and isinstance(value[0], dict)
        if name in ("tools", "tool_defs") and is_list:
            value = OTHER_TOOLS
        elif is_list and "role" in value[0]:
            value = talk[:1] if name == "prompt" else talk[-1:] if len(value) == 1 else talk
            if "chosen" in row:
                value = [*row[name][:-1], talk[-1]] if name in ("chosen", "rejected") else row[name]
        made[name] = value
    return made


def table(rows):
    import datasets
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset(pa.table({name: [row.get(name) for row in rows] for name in names}))


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        table(rows).to_parquet(path)
    else:
        text = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in r.items()} for r in rows]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(text)
    return str(path)


@pytest.fixture
def common(tokenizer_folder):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer_folder("qwen3"), renderer_name="qwen3", batch_size=1
    )


def builder(common, source, row, tmp_path, monkeypatch):
    """The builder of a source with ``row`` first; None where the source has no such layout."""
    rows = [row, filler(row)]
    if source == "hub":
        import datasets

        monkeypatch.setattr(hf_datasets, "why_hub_is_unreachable", lambda: None)
        made = {"train": table(rows)}
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
        return ChatDataBuilder(common_config=common, file_path="OWNER/NAME")
    kind = {"mixture of jsonl": "jsonl"}.get(source, source if source in FILES else "parquet")
    path = write(tmp_path / f"{source.replace(' ', '_')}.{kind}", rows)
    if source in FILES:
        return ChatDataBuilder(common_config=common, file_path=path)
    field = next((name for name in ("messages", "conversations") if name in row), None)
    if field is None:
        return None
    weights = (1.0, 0.0) if source == "mixture of two tables" else (1.0,)
    sources = [HFDatasetSource(path=path, message_field=field, weight=w) for w in weights]
    return InterleavedChatDatasetBuilder(
        common_config=common, sources=sources, stopping_strategy="first_exhausted"
    )


def text_of(datum, tokenizer):
    last = int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])
    return tokenizer.decode([*datum.model_input.to_ints(), last])


def of_template(tokenizer, messages, tools=None):
    text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    return text.removesuffix("\n")  # an example ends with the last token that is sampled


@pytest.mark.parametrize("case", READ)
def test_a_row_is_rendered_alike_from_every_source(common, case, tmp_path, monkeypatch):
    row, messages, *tools = READ[case]
    for source in SOURCES:
        made = builder(common, source, row, tmp_path, monkeypatch)
        if made is None:
            continue
        (datum,) = made()[0].get_batch(0)[-1:]
        text = text_of(datum, made.tokenizer)
        assert text == of_template(made.tokenizer, messages, *tools), source


EXCLUDED = {
    "trainable": {"messages": [HI, {**BYE, "trainable": False}, HI, GO]},
    "an answer in a prompt": {"prompt": [HI, BYE, HI], "completion": [GO]},
}


@pytest.mark.parametrize("case", EXCLUDED)
def test_excluded_messages_are_not_trained(common, case, tmp_path, monkeypatch):
    for source in SOURCES:
        made = builder(common, source, EXCLUDED[case], tmp_path, monkeypatch)
        if made is None:
            continue
        (datum,) = made()[0].get_batch(0)
        trained = datum.loss_fn_inputs["weights"].to_numpy() > 0
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()[trained]
        text = made.tokenizer.decode(targets.tolist())
        assert text.strip() == "<think>\n\n</think>\n\nGo.<|im_end|>", source


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_is_refused_from_every_source(common, case, tmp_path, monkeypatch):
    row, message = REFUSED[case]
    for source in SOURCES:
        made = builder(common, source, row, tmp_path, monkeypatch)
        if made is not None:
            with pytest.raises(DataError, match=message):
                made()[0].get_batch(0)


@pytest.mark.parametrize("case", PAIRS)
def test_a_pair_is_rendered_alike_from_every_file(common, case, tmp_path):
    row, prompt, chosen, rejected, *tools = PAIRS[case]
    for kind in FILES:
        path = write(tmp_path / f"rows.{kind}", [row, filler(row)])
        comparisons = ComparisonBuilderFromJsonl(train_path=path)
        made = DPODatasetBuilderFromComparisons(
            common_config=common, comparison_builder=comparisons
        )
        data = made()[0].get_batch(0)
        for datum, answer in zip(data, (chosen, rejected), strict=True):
            expected = of_template(made.tokenizer, [*prompt, answer], *tools)
            assert text_of(datum, made.tokenizer) == expected, kind
            trained = datum.loss_fn_inputs["weights"].to_numpy() > 0
            begun = made.tokenizer.decode(datum.model_input.to_ints()[: trained.argmax() + 1])
            assert (
                begun == of_template(made.tokenizer, prompt, *tools) + "\n<|im_start|>assistant\n"
            )
        # A reward model sees the same tools and calls.
        judged = ChatDatasetBuilderFromComparisons(
            common_config=common, comparison_builder=comparisons
        )
        seen = text_of(judged()[0].get_batch(0)[0], judged.tokenizer)
        for part in (
            "The weather." if tools else prompt[-1]["content"],
            '"city": "Paris"' if "tool_calls" in chosen else "Go.",
        ):
            assert part in seen


@pytest.mark.parametrize("case", REFUSED_PAIRS)
def test_a_pair_is_refused_from_every_file(case, tmp_path):
    row, message = REFUSED_PAIRS[case]
    for kind in FILES:
        path = write(tmp_path / f"rows.{kind}", [row])
        with pytest.raises(DataError, match=rf"rows\.{kind}.*{message}"):
            _ = ComparisonBuilderFromJsonl(train_path=path).comparison_sets
