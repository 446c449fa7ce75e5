"""A run continues only on the data that it began with: every loop and source of data, every edit.

Each loop trains one step of the 260k-parameter model; a refused start loads no model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import chz
import datasets
import pytest
from homes import new_home

from recipes import rl_loop, sl_loop
from tinker_cookbook import rl
from tinker_cookbook.distillation import sdft, train_off_policy, train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDatasetBuilder,
    TeacherConfig,
)
from tinker_cookbook.distillation.sdft_data import DemonstrationBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.preference.types import Comparison
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.envs.problem_env import ProblemEnv
from tinker_cookbook.rl.interleaved import InterleavedRLDatasetBuilder
from tinker_cookbook.run.data_record import data_changes, data_record
from tinker_cookbook.run.digests import rows_digest, value_digest
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.mixtures import HFDatasetSource, InterleavedChatDatasetBuilder
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
)

# More rows than are sampled of a sequence of an unknown type; one that is not sampled is edited.
NAMES = [f"{name}{i}" for i in range(33) for name in ("Tom", "Lily", "Ben", "Sue")]
EDITS: dict[str, Any] = {
    "removed": lambda rows: rows[:6],
    "added": lambda rows: [*rows, row("Zoe")],
    "reordered": lambda rows: rows[::-1],
    "edited": lambda rows: [rows[0], row("Zoe"), *rows[2:]],
}
Rows = list[dict[str, Any]]


def row(name: str) -> dict[str, Any]:
    """One row that every loop can read, each by its own keys."""
    question, answer = f"Who is {name}? {len(name)} + 1 =", f"{len(name) + 1}"
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    pair = {"prompt": question, "chosen": answer, "rejected": f"{name} ran."}
    return {"messages": said, "pair": pair, "problem": {"question": question, "answer": answer}}


def common(model: str) -> ChatDatasetBuilderCommonConfig:
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name="role_colon", batch_size=2
    )


def jsonl(folder: Path, rows: Rows, key: str) -> str:
    file = folder / "data.jsonl"
    kept = [{key: r[key]} if key == "messages" else r[key] for r in rows]
    file.write_text("".join(json.dumps(one) + "\n" for one in kept))
    return str(file)


def table(folder: Path, rows: Rows) -> str:
    file = folder / "data.parquet"
    datasets.Dataset.from_list([{"messages": r["messages"]} for r in rows]).to_parquet(str(file))
    return str(file)


@chz.chz
class ListBuilder(ChatDatasetBuilder):
    """A builder of a user's own, over a list in memory."""

    talks: Any = ()

    def __call__(self):
        def datum(talk: Any) -> Any:
            return conversation_to_datum(talk, self.renderer, None)

        rows = [r["messages"] for r in self.talks.rows]
        return SupervisedDatasetFromHFDataset(rows, 2, map_fn=datum), None


class Unlisted:
    """Rows that the configuration cannot show."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows


class Question(ProblemEnv):
    """The reward does not matter here."""

    def __init__(self, problem, renderer):
        super().__init__(renderer)
        self.problem = problem

    def get_question(self):
        return self.problem["question"]

    def check_answer(self, sample_str):
        return float(len(sample_str) % 2)


def chat_data(builder_type: type, file: str, model: str, **settings: Any) -> Any:
    return builder_type(common_config=common(model), file_path=file, **settings)


def jsonl_data(folder, rows, model):
    return chat_data(FromConversationFileBuilder, jsonl(folder, rows, "messages"), model)


def held_out_data(folder, rows, model):
    file = jsonl(folder, rows, "messages")
    return chat_data(FromConversationFileBuilder, file, model, test_size=2)


def parquet_data(folder, rows, model):
    return chat_data(ChatDataBuilder, table(folder, rows), model)


def mixed_data(folder, rows, model):
    files = (jsonl(folder, rows, "messages"), table(folder, [row(name) for name in NAMES]))
    sources = [HFDatasetSource(path=file, weight=1.0) for file in files]
    return InterleavedChatDatasetBuilder(common_config=common(model), sources=sources)


def list_data(folder, rows, model):
    return ListBuilder(common_config=common(model), talks=Unlisted(rows))


def settings_of(folder: Path, model: str) -> dict[str, Any]:
    return {
        "log_path": str(folder / "run"),
        "model_name": model,
        "renderer_name": "role_colon",
        "lora_rank": 4,
        "max_steps": 1,
        "backend": "local",
        "device": "cpu",
        "dtype": "float32",
    }


def supervised(build):
    def start(folder, rows, model, **extra):
        settings = {**settings_of(folder, model), "show_samples": 0, "data_report": 0, **extra}
        config = train.Config(dataset_builder=build(folder, rows, model), **settings)
        asyncio.run(train.main(config))

    return start


def dpo(folder, rows, model, **extra):
    comparisons = ComparisonBuilderFromJsonl(train_path=jsonl(folder, rows, "pair"))
    builder = DPODatasetBuilderFromComparisons(
        common_config=common(model), comparison_builder=comparisons
    )
    settings = {**settings_of(folder, model), "show_samples": 0, "data_report": 0, **extra}
    train_dpo.main(train_dpo.Config(dataset_builder=builder, **settings))


def off_policy(folder, rows, model, **extra):
    part = train_off_policy.DatasetWithTeacher(
        dataset_builder=jsonl_data(folder, rows, model),
        teacher_config=TeacherConfig(base_model=model),
    )
    settings = {**settings_of(folder, model), "show_samples": 0, "data_report": 0, **extra}
    config = train_off_policy.Config(dataset_configs=[part], batch_size=2, **settings)
    asyncio.run(train_off_policy.main(config))


def self_distillation(folder, rows, model, **extra):
    builder = chat_data(DemonstrationBuilder, jsonl(folder, rows, "messages"), model)
    settings = {**settings_of(folder, model), "show_samples": 0, "data_report": 0, **extra}
    asyncio.run(sdft.main(sdft.Config(dataset_builder=builder, max_tokens=4, **settings)))


def prompts_of(folder, rows, model):
    return PromptOnlyDatasetBuilder(
        dataset_name=jsonl(folder, rows, "messages"),
        groups_per_batch=2,
        group_size=2,
        model_name_for_tokenizer=model,
        renderer_name="role_colon",
    )


def on_policy(folder, rows, model, **extra):
    part = DistillationDatasetConfig(
        dataset_builder=prompts_of(folder, rows, model),
        teacher_config=TeacherConfig(base_model=model),
        groups_per_batch=2,
    )
    settings = {**settings_of(folder, model), "max_tokens": 4, **extra}
    asyncio.run(train_on_policy.main(train_on_policy.Config(dataset_configs=[part], **settings)))


def own_task(folder, rows, model, **extra):
    settings = {**settings_of(folder, model), "behavior_if_log_dir_exists": "resume", **extra}
    settings |= {"batch_size": 2, "group_size": 2, "max_tokens": 4}
    del settings["model_name"]
    rl.run(env=Question, problems=[r["problem"] for r in rows], model_name=model, **settings)


def mixed_rl(folder, rows, model, **extra):
    sources = InterleavedRLDatasetBuilder(
        sources=[prompts_of(folder, rows, model)], weights=[1.0], groups_per_batch=2
    )
    settings = {**settings_of(folder, model), "max_tokens": 4, **extra}
    config = rl_train.Config(dataset_builder=sources, learning_rate=1e-3, **settings)
    asyncio.run(rl_train.main(config))


def own_loop(module, key, **fixed):
    def start(folder, rows, model, **extra):
        settings = settings_of(folder, model) | fixed | extra
        if module is rl_loop:
            settings["num_steps"] = settings.pop("max_steps")
        settings |= {"dataset_path": jsonl(folder, rows, key)}
        module.main(module.Config(behavior_if_log_dir_exists="resume", **settings))

    return start


LOOPS = {
    "JSONL, held out": supervised(held_out_data),
    "Parquet": supervised(parquet_data),
    "mixture": supervised(mixed_data),
    "Python list": supervised(list_data),
    "DPO": dpo,
    "off-policy distillation": off_policy,
    "self-distillation": self_distillation,
    "on-policy distillation": on_policy,
    "rl.run": own_task,
    "RL mixture": mixed_rl,
    "sl_loop": own_loop(sl_loop, "messages", batch_size=2),
    "rl_loop": own_loop(rl_loop, "problem", groups_per_batch=2, group_size=2, max_tokens=4),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_other_data_are_refused(stories_model, tmp_path, monkeypatch, capsys, loop):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    rows, start = [row(name) for name in NAMES], LOOPS[loop]
    start(tmp_path, rows, stories_model)
    before = (tmp_path / "run" / "data_record.json").read_bytes()
    for name, edit in EDITS.items():
        with pytest.raises(ConfigurationError, match=r"training data.* rows → \d+ .*rows") as found:
            start(tmp_path, edit(rows), stories_model, max_steps=2)
        assert "allow_config_change=true" in str(found.value), name
    assert (tmp_path / "run" / "data_record.json").read_bytes() == before
    # The same rows, written anew, are accepted.
    capsys.readouterr()
    start(tmp_path, rows, stories_model)
    assert "changed since" not in capsys.readouterr().out


def test_a_run_continues_on_other_data_on_purpose(stories_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    rows, start = [row(name) for name in NAMES], LOOPS["JSONL, held out"]
    start(tmp_path, rows, stories_model)
    start(tmp_path, rows[:8], stories_model, max_steps=2, allow_config_change=True)
    said = capsys.readouterr().out
    assert "changed since the run began: training data: 130 rows → 6 rows" in said
    assert "held out now may be among those trained on" in said
    # From here on, these are the data of the run.
    start(tmp_path, rows[:8], stories_model, max_steps=3, show_samples=1, sample_max_tokens=2)
    said = capsys.readouterr().out
    assert "held-out prompt, after step 2" in said
    assert "before training" not in said
    # Runs of earlier versions have no record.
    (tmp_path / "run" / "data_record.json").unlink()
    start(tmp_path, rows, stories_model, max_steps=4)
    assert "this run has no data_record.json" in capsys.readouterr().out


@pytest.mark.parametrize("loop", ["JSONL, held out", "rl.run", "sl_loop"])
def test_an_unfinished_run_never_says_that_it_is_complete(
    stories_model, tmp_path, monkeypatch, capsys, loop
):
    """Shorter data, on purpose: refused below the steps that were done, and finished at them."""
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    rows, start = [row(name) for name in NAMES], LOOPS[loop]
    checkpoints = tmp_path / "run" / "checkpoints.jsonl"
    start(tmp_path, rows, stories_model, max_steps=4, save_every=3)
    # As if killed after the checkpoint of step 3.
    checkpoints.write_text(checkpoints.read_text().splitlines()[0] + "\n")
    with pytest.raises(ConfigurationError, match=r"has 3 steps and is not finished.*max_steps=3"):
        start(tmp_path, rows, stories_model, max_steps=2, save_every=3)
    start(tmp_path, rows, stories_model, max_steps=3, save_every=3)
    last = json.loads(checkpoints.read_text().splitlines()[-1])
    assert (last["batch"], last["final"], "sampler_path" in last) == (3, True, True)


def test_a_quantised_base_is_another_setting(tmp_path):
    from tinker_cookbook.run.changes import changed_settings
    from tinker_cookbook.run.config import write_config

    base = train.Config(dataset_builder=jsonl_data(tmp_path, [], "m"), **settings_of(tmp_path, "m"))
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run" / "config.json", base)
    free = chz.replace(base, dtype="bfloat16", shard_base=True, save_every=7)
    assert changed_settings(base.log_path, free) == {}
    found = changed_settings(base.log_path, chz.replace(base, base_dtype="nf4"))
    assert found == {"base_dtype": "base_dtype: auto → nf4"}
    # A run of an earlier version, which had a class in another module.
    file = tmp_path / "run" / "config.json"
    kind = "FromConversationFileBuilder"
    file.write_text(file.read_text().replace("supervised.conversation_file:", "supervised.old:"))
    assert changed_settings(base.log_path, base) == {}
    file.write_text(file.read_text().replace(f"old:{kind}", "old:Another"))
    assert list(changed_settings(base.log_path, base)) == ["dataset_builder"]


def test_a_class_without_data_sources_is_compared_by_its_batches():
    before, now = data_record(OnlyBatches(4)), data_record(OnlyBatches(5))
    assert before == {"training data": {"batches": 4}}
    assert data_changes(before, before, longer=False, rebuilt=False) == []
    lines = ["training data: 4 batches → 5 batches"]
    assert data_changes(before, now, longer=False, rebuilt=False) == lines
    # It may repeat its rows for num_epochs itself.
    assert data_changes(before, now, longer=True, rebuilt=False) == []


class OnlyBatches(SupervisedDataset):
    """A dataset of a user's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def get_batch(self, index: int) -> Any:
        return []


def test_digests_depend_on_content_only():
    rows = [{"messages": row(name)["messages"], "n": i or None} for i, name in enumerate(NAMES * 9)]
    whole = datasets.Dataset.from_list(rows)
    parts = datasets.concatenate_datasets(
        [whole.select(range(701)), whole.select(range(701, 1188))]
    )
    twice = whole.select(range(1187, -1, -1)).select(range(1187, -1, -1))
    assert rows_digest(whole) == rows_digest(parts) == rows_digest(twice)
    assert rows_digest(whole) != rows_digest(whole.shuffle(seed=1))
    assert rows_digest(rows) == rows_digest(tuple(rows)) != rows_digest(rows[::-1])
    assert rows_digest([{(1, 2): "a tuple as a key"}]) is None

    def adder(number):
        return lambda x: x + number

    one, other = adder(1), adder(1)
    assert value_digest(one) == value_digest(other) != value_digest(adder(2))
    assert value_digest(lambda x: x + 1) != value_digest(lambda x: x - 1)
    assert value_digest(object()) is None


def _shown(file: str) -> dict[str, Any]:
    """Rows of every kind that name a file of an image or of audio."""
    part = {"type": "image", "image": file}
    talk = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    stored = datasets.Features({"image": datasets.Image(decode=False)})
    return {
        "messages": [talk],
        "a URI": [[{"type": "image", "image": Path(file).as_uri()}]],
        "transformers": [{"messages": [{"content": [{"type": "image", "path": file}]}]}],
        "OpenAI": [{"messages": [{"type": "image_url", "image_url": {"url": file}}]}],
        "audio": [[{"type": "audio", "audio": file}]],
        "column": [{"image": file, "question": "?"}],
        "list": [{"images": [file, file]}],
        "pair": [Comparison(prompt_conversation=talk, completion_A=[], completion_B=[])],
        "table": datasets.Dataset.from_list([{"image": file, "n": 1}]),
        "table of lists": datasets.Dataset.from_list([{"images": [file], "n": 1}] * 60),
        "table of parts": datasets.Dataset.from_list([{"messages": talk}]),
        "table of paths": datasets.Dataset.from_list([{"image": {"path": file}}], stored),
    }  # fmt: skip


def test_a_file_of_an_image_counts_by_its_bytes(tmp_path):
    for name, data in {"a": b"1", "copy": b"1", "other": b"2"}.items():
        (tmp_path / f"{name}.png").write_bytes(data)
    one, copy, other = (
        {kind: rows_digest(rows) for kind, rows in _shown(str(tmp_path / f"{name}.png")).items()}
        for name in ("a", "copy", "other")
    )
    for kind, digest in one.items():
        assert len(digest or "") == 64, kind
        assert digest == copy[kind] != other[kind], kind
    text = [{"messages": [{"role": "user", "content": 'An "image" and <image>'}]}]
    assert (
        rows_digest(text)
        == hashlib.sha256(json.dumps(text, separators=(",", ":")).encode()).hexdigest()
    )
