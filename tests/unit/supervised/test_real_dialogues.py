"""Public dialogue data, converted as a user would, through every chat format."""

from __future__ import annotations

import json

import pytest

from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
from tinker_cookbook.supervised.nll_evaluator import all_data
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

FORMATS = [
    ("role_colon", "smollm2"),
    ("chatml", "smollm2"),
    ("llama3", "llama3"),
    ("qwen3", "qwen3"),
    ("qwen3_disable_thinking", "qwen3"),
    ("qwen3_instruct", "qwen3"),
]
WITH_TOOLS = [(name, family) for name, family in FORMATS if name.startswith(("llama3", "qwen3"))]


def build(tokenizer_folder, path, name, family, **settings):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer_folder(family),
        renderer_name=name,
        batch_size=32,
        max_length=1024,
    )
    return FromConversationFileBuilder(common_config=common, file_path=str(path), **settings)


def trained_text(data, tokenizer):
    texts = []
    for datum in data:
        mask = datum.loss_fn_inputs["weights"].to_numpy() != 0
        texts.append(
            tokenizer.decode(datum.loss_fn_inputs["target_tokens"].to_numpy()[mask].tolist())
        )
    return texts


@pytest.mark.parametrize(("name", "family"), FORMATS)
def test_gsm8k(shared_dir, tokenizer_folder, write_jsonl, name, family):
    lines = (shared_dir / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()[:100]
    problems = [json.loads(line) for line in lines]
    path = write_jsonl(
        *[
            {
                "messages": [
                    {"role": "user", "content": problem["question"]},
                    {"role": "assistant", "content": problem["answer"]},
                ]
            }
            for problem in problems
        ]
    )
    made = build(tokenizer_folder, path, name, family)
    data = all_data(made()[0])
    assert len(data) == 100
    for text, problem in zip(trained_text(data, made.tokenizer), problems, strict=True):
        assert problem["answer"].strip() in text
        assert problem["question"] not in text


ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def to_messages(row):
    """A row of the tool-call set in messages; calls are turns of the assistant."""
    messages = []
    for turn in row["conversations"]:
        if turn["from"] == "function_call":
            call = {"function": json.loads(turn["value"])}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": ROLES[turn["from"]], "content": turn["value"]})
    return messages


@pytest.mark.parametrize(("name", "family"), WITH_TOOLS)
def test_tool_calls(shared_dir, tokenizer_folder, write_jsonl, name, family):
    file = shared_dir / "data" / "llamafactory_demo" / "glaive_toolcall_en_demo.json"
    rows = [to_messages(row) for row in json.loads(file.read_text())[:100]]
    with_calls = [messages for messages in rows if any("tool_calls" in m for m in messages)]
    assert 20 < len(with_calls) < 100
    made = build(
        tokenizer_folder, write_jsonl(*[{"messages": messages} for messages in rows]), name, family
    )
    text = "".join(trained_text(all_data(made()[0]), made.tokenizer))
    for messages in with_calls:
        for message in messages:
            for call in message.get("tool_calls", []):
                assert json.dumps(call["function"]["name"]) in text
