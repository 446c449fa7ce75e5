"""Images in rows of data: every form and source gives the same datum; errors name file and row."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil

import pytest

from tinker_cookbook.distillation.datasets import PromptOnlyDatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.image_processing_utils import png_bytes
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import (
    ComparisonBuilderFromJsonl,
)
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

Image = pytest.importorskip("PIL.Image")

FILE = "pictures/red.png"
WHAT = {"type": "text", "text": "What?"}
PICTURE = {"type": "image", "image": FILE}
RED = {"role": "assistant", "content": "red"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / FILE).write_bytes(png_bytes(Image.new("RGB", (64, 48), "red")))
    (tmp_path / "pictures/half.png").write_bytes((tmp_path / FILE).read_bytes()[:90])
    return tmp_path


def common(model, renderer="qwen3_vl_instruct", **settings):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=renderer, batch_size=1, **settings
    )


def image(source):
    return asked({"type": "image", "image": source})


def asked(*parts):
    return [{"role": "user", "content": [*parts, WHAT]}, RED]


def forms(data, folder):
    """Rows that show one picture and ask about it, each in another form."""
    text = base64.b64encode(data).decode()
    uri = f"data:image/png;base64,{text}"
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "red"}]
    return {
        "file": {"messages": asked(PICTURE)},
        "whole path": {"messages": image(str(folder / FILE))},
        "data URI": {"messages": image(uri)},
        "base64": {"messages": image(text)},
        "OpenAI": {"messages": asked({"type": "image_url", "image_url": {"url": uri}})},
        "OpenAI responses": {"messages": asked({"type": "input_image", "image_url": uri})},
        "transformers": {"messages": asked({"type": "image", "path": FILE})},
        "TRL": {"messages": asked({"type": "image"}), "images": [FILE]},
        "TRL, text": {"prompt": "What?", "completion": "red", "images": [FILE]},
        "LLaVA": {"id": "7", "image": FILE, "conversations": turns},
        "LLaMA-Factory": {"images": [FILE], "conversations": turns},
        "question": {"image": FILE, "question": "What?", "answer": "red"},
        "base64 column": {"image": text, "question": "What?", "answer": "red"},
        "two kinds of columns": {
            "image": uri,
            "image_path": "x",
            "question": "What?",
            "answer": "red",
        },
    }


def parquet(row, file):
    arrow = pytest.importorskip("pyarrow.parquet")
    arrow.write_table(pytest.importorskip("pyarrow").Table.from_pylist([row]), file)


def in_columns(row):
    """The row for Arrow: a column has cells of one type, so all contents are lists of parts."""
    messages = [
        message
        if isinstance(content := message["content"], list)
        else message | {"content": [{"type": "text", "text": content}]}
        for message in row.get("messages", ())
    ]
    return row | {"messages": messages} if messages else row


def sources(folder, row, kind):
    """Writes a row as a file of each format that can hold it."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "rows.json").write_text(json.dumps([row]))
    parquet(in_columns(row), folder / "rows.parquet")
    yield from ("rows.jsonl", "rows.json", "rows.parquet")
    if kind == "question":
        (folder / "rows.csv").write_text(f"image,question,answer\n{FILE},What?,red\n")
        yield "rows.csv"
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list([row | {"image": str(folder / FILE)}])
        parquet(row | {"image": {"bytes": None, "path": FILE}}, folder / "cell.parquet")
        parquet(row | {"image": json.dumps([FILE])}, folder / "text.parquet")
        yield from ("cell.parquet", "text.parquet")
        (folder / "hub").mkdir()
        # As the Hub has it: bytes and path in the file, a Pillow image in the row.
        table.cast_column("image", datasets.Image()).to_parquet(folder / "hub/train.parquet")
        yield from ("hub", "hub/train.parquet")


def test_every_form_gives_the_same_datum(vision_tokenizer, folder):
    data, found = (folder / FILE).read_bytes(), {}
    for kind, row in forms(data, folder).items():
        for name in sources(folder, row, kind):
            builder = ChatDataBuilder(
                common_config=common(vision_tokenizer), file_path=str(folder / name)
            )
            (datum,) = builder()[0].get_batch(0)
            found[kind, name] = datum.model_input, datum.loss_fn_inputs["weights"].data
    renderer = get_renderer("qwen3_vl_instruct", get_tokenizer(vision_tokenizer))
    reference = renderer.build_generation_prompt(asked({"type": "image", "image": data})[:1])
    model_input, weights = found["file", "rows.jsonl"]
    assert model_input.chunks[1] == reference.chunks[1]
    assert model_input.chunks[1].data == data
    assert len(weights) == model_input.length
    assert all(other == (model_input, weights) for other in found.values()), found.keys()
    assert len(found) > 3 * len(forms(data, folder))


def test_marks_keep_their_places(vision_tokenizer, folder):
    Image.new("RGB", (64, 48), "blue").save(folder / "b.png")
    row = {
        "messages": [
            {"role": "user", "content": "<image> or\n<image>?"},
            {"role": "assistant", "content": "HTML's <image>."},
            {"role": "user", "content": "<image>!"},
            RED,
        ],
        "images": [FILE, "b.png", FILE],
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    path = str(folder / "rows.jsonl")
    builder = ChatDataBuilder(common_config=common(vision_tokenizer), file_path=path)
    (datum,) = builder()[0].get_batch(0)
    shown = [
        chunk.data == (folder / FILE).read_bytes()
        if chunk.type == "image"
        else builder.tokenizer.decode(chunk.tokens)
        for chunk in datum.model_input.chunks
    ]
    assert shown[1::2] == [True, False, True]
    assert shown[2] == "<|vision_end|> or\n<|vision_start|>"
    assert "HTML's <image>." in shown[4]


BAD = {
    "missing": (image("no.png"), {}, r"messages\[0\].content\[0\].*no\.png"),
    "damaged": (image("pictures/half.png"), {}, "cannot be read as an"),
    "remote": (image("https://x.org/a.png"), {}, "download it first"),
    "empty": (asked({"type": "image_url", "image_url": {}}), {}, "got 0 images and 1 parts"),
    "in the answer": (
        [{"role": "user", "content": "Draw."}, {**RED, "content": [PICTURE]}],
        {},
        r"messages\[1\].content: .*images belong to messages of users and tools",
    ),
    "too long": (asked(PICTURE), {"max_length": 40}, "would cut an image of"),
    "text renderer": (asked(PICTURE), {"renderer": "qwen3"}, "'image'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_errors_name_file_row_and_field(vision_tokenizer, folder, kind):
    messages, settings, error = BAD[kind]
    good = {"messages": [{"role": "user", "content": "Hi"}, RED]}
    lines = [json.dumps(row) for row in (good, {"messages": messages})]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    path = str(folder / "rows.jsonl")
    builder = ChatDataBuilder(common_config=common(vision_tokenizer, **settings), file_path=path)
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{error}"):
        builder()


@pytest.mark.parametrize(
    ("renderer", "with_image", "said"),
    [
        ("llama3", True, r"^renderer_name: got 'llama3', but .*<\|eot_id\|>"),
        ("llama3", False, r"^renderer_name: got 'llama3', but .*<\|eot_id\|>"),
        ("smolvlm", True, "^renderer_name: got 'smolvlm', but .*<end_of_utterance>"),
        ("qwen3", True, r"rows.jsonl:1: messages\[0\].*renderer_name: got 'qwen3'"),
        ("role_colon", True, r"rows.jsonl:1: messages\[0\].*renderer_name: got 'role_colon'"),
        ("chatml", True, r"rows.jsonl:1: messages\[0\].*renderer_name: got 'chatml'"),
    ],
)
def test_a_wrong_renderer_is_named_with_what_fits(
    vision_tokenizer, folder, renderer, with_image, said
):
    model = folder / "model"
    shutil.copytree(vision_tokenizer, model)
    (model / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    messages = asked(PICTURE) if with_image else asked()
    (folder / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    builder = ChatDataBuilder(
        common_config=common(str(model), renderer), file_path=str(folder / "rows.jsonl")
    )
    fits = f"{said}.*expected renderer_name=qwen3_vl_instruct, which fits .*or no renderer_name"
    with pytest.raises((DataError, ConfigurationError), match=fits):
        builder()[0].get_batch(0)


PAIRS = {
    "column": {"prompt": "What?", "chosen": "red", "rejected": "blue", "images": [FILE]},
    "TRL": {
        "prompt": asked({"type": "image"})[:1],
        "chosen": [RED],
        "rejected": [{**RED, "content": "blue"}],
        "images": [FILE],
    },
    "without a prompt": {
        "chosen": asked({"type": "image"}),
        "rejected": [*asked({"type": "image"})[:1], {**RED, "content": "blue"}],
        "image": FILE,
    },
    "parts": {"prompt": asked(PICTURE)[:1], "chosen": "red", "rejected": "blue"},
    "repeated": {
        "prompt": "What?",
        "chosen": [{"role": "user", "content": "What?"}, RED],
        "rejected": [{"role": "user", "content": "What?"}, {**RED, "content": "blue"}],
        "images": [FILE],
    },
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "<image>What?"}],
        "chosen": {"from": "gpt", "value": "red"},
        "rejected": {"from": "gpt", "value": "blue"},
        "images": [FILE],
    },
    "official": {
        "comparison": {
            "prompt_conversation": asked(PICTURE)[:1],
            "completion_A": [RED],
            "completion_B": [{**RED, "content": "blue"}],
        },
        "label": "A",
    },
}


def test_pairs_share_the_image_of_their_prompt(vision_tokenizer, folder):
    def built(*rows, **settings):
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DPODatasetBuilderFromComparisons(
            common_config=common(vision_tokenizer, **settings),
            comparison_builder=ComparisonBuilderFromJsonl(train_path=str(folder / "pairs.jsonl")),
        )()[0]

    seen = {"role": "assistant", "content": [PICTURE]}
    pairs = {kind: built(row).get_batch(0) for kind, row in PAIRS.items()}
    chosen, rejected = pairs["column"]
    assert chosen.model_input.chunks[1].data == (folder / FILE).read_bytes()
    assert chosen.model_input.chunks[:2] == rejected.model_input.chunks[:2]
    for kind, pair in pairs.items():
        inputs = [datum.model_input for datum in pair]
        assert inputs == [chosen.model_input, rejected.model_input], kind
    for row, settings, error in (
        ({**PAIRS["column"], "images": ["no.png"]}, {}, "no.png"),
        (PAIRS["column"], {"max_length": 40}, "would cut an image"),
        ({"prompt": "What?", "chosen": [seen], "rejected": "no"}, {}, "content: .* cannot write"),
        ({**PAIRS["column"], "rejected": [seen]}, {}, "content: .* cannot write"),
    ):
        with pytest.raises(DataError, match=rf"pairs\.jsonl:\d: .*{error}"):
            built(row, **settings)


def test_prompts_of_distillation_have_images(vision_tokenizer, folder):
    def observations(*rows, **settings):
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        builder = PromptOnlyDatasetBuilder(
            dataset_name=str(folder / "prompts.jsonl"),
            groups_per_batch=len(rows),
            group_size=1,
            model_name_for_tokenizer=vision_tokenizer,
            renderer_name="qwen3_vl_instruct",
            **settings,
        )

        async def run():
            dataset, _ = await builder()
            envs = [(await group.make_envs())[0] for group in dataset.get_batch(0)]
            return [(await env.initial_observation())[0] for env in envs]

        return asyncio.run(run())

    first, second = observations({"prompt": "What?", "image": FILE}, {"messages": asked(PICTURE)})
    assert first == second
    assert first.chunks[1].data == (folder / FILE).read_bytes()
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: .*no\.png"):
        observations({"prompt": "What?", "image": "no.png"})
    with pytest.raises(DataError, match="the shortest of 1 prompts"):
        observations({"prompt": "What?", "image": FILE}, max_prompt_tokens=40)
