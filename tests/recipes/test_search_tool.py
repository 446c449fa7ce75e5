"""The search tool: calls, rewards, questions, environments, training and evaluation."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from types import SimpleNamespace as Box
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny_model import make_chat_model

from recipes.search_tool import offline_eval, train
from recipes.search_tool.questions import (
    EXAMPLE_DOCUMENTS,
    process_single_row,
    read_questions,
)
from recipes.search_tool.search_env import (
    SEARCH_TASK_INSTRUCTIONS,
    SearchEnvGroupBuilder,
    SearchR1DatasetBuilder,
    SearchRLDataset,
)
from recipes.search_tool.tools import (
    ChromaTool,
    LocalSearchTool,
    RetrievalConfig,
    TextAnswerReward,
    normalize_answer,
)
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
)
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.rl.rollouts.episode import do_single_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import ToolInput

pytest.importorskip("bm25s", reason="pip install -e '.[search]'")
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def search_tool() -> LocalSearchTool:
    return LocalSearchTool(str(EXAMPLE_DOCUMENTS), RetrievalConfig(n_results=2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its text is noise. By the beginning and end of its name it has the format of Qwen3."""
    return make_chat_model(tmp_path_factory.mktemp("model") / "qwen3-noise-instruct")


def text_of(tool: Any, queries: Any) -> str:
    result = asyncio.run(tool.search.run(ToolInput({"query_list": queries}, "call_1")))
    (message,) = result.messages
    assert message["role"] == "tool"
    assert message["tool_call_id"] == "call_1"
    return str(message["content"])


def test_what_the_model_sees(search_tool: LocalSearchTool):
    spec = search_tool.search.to_spec()
    assert spec["name"] == "search"
    assert spec["parameters"]["properties"]["query_list"]["items"] == {"type": "string"}
    text = text_of(search_tool, ["Saltash", "zzz"])
    assert text.startswith("Query: Saltash\nDocument 1:\n")
    assert "Saltash" in text.splitlines()[2]
    assert text.endswith("Query: zzz\nNo document was found.")
    short = LocalSearchTool(str(EXAMPLE_DOCUMENTS), RetrievalConfig(n_results=1, max_chars=5))
    assert text_of(short, ["Saltash"]).splitlines()[2].endswith(" […]")


@pytest.mark.parametrize(
    "queries", [[], [""], ["x", "  "], ["x"] * 9, "Saltash", [3], None, {"q": "x"}]
)
def test_malformed_arguments_are_errors_that_the_model_reads(
    search_tool: LocalSearchTool, queries: Any
):
    assert "query_list" in json.loads(text_of(search_tool, queries))["error"]


def test_a_tool_pickles_without_its_index(search_tool: LocalSearchTool):
    data = pickle.dumps(search_tool)
    assert len(data) < 2000
    assert text_of(pickle.loads(data), ["Saltash"]) == text_of(search_tool, ["Saltash"])
    bound = pickle.loads(pickle.dumps(search_tool.search))
    assert bound.name == "search"


def test_chroma_tool_retries_reports_and_pickles():
    class Collection:
        failures = 2

        async def query(self, query_embeddings: Any, n_results: int) -> dict[str, Any]:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("busy")
            return {"documents": [[f"text {v[0]:g}"] * n_results for v in query_embeddings]}

    class Client:
        def __init__(self) -> None:
            self.collection = Collection()

        async def get_collection(self, name: str) -> Collection:
            assert name == "wiki"
            return self.collection

    async def embed_content(model: str, contents: list[str], config: Any) -> Any:
        assert config == {"output_dimensionality": 768, "task_type": "RETRIEVAL_QUERY"}
        return Box(embeddings=[Box(values=[float(len(text))]) for text in contents])

    gemini = Box(aio=Box(models=Box(embed_content=embed_content)))

    async def build(retries: int) -> ChromaTool:
        config = RetrievalConfig(n_results=2)
        return await ChromaTool.build(
            "localhost", 8000, "wiki", config, retries, 0.001, Client(), gemini
        )

    tool = asyncio.run(build(3))
    assert text_of(tool, ["ab"]) == "Query: ab\nDocument 1:\ntext 2\nDocument 2:\ntext 2"
    # A server that does not answer is no mistake of the model.
    result = asyncio.run(asyncio.run(build(2)).search.run(ToolInput({"query_list": ["ab"]})))
    assert result.error_type == "unavailable"
    state = pickle.loads(pickle.dumps(tool)).__dict__
    assert (state["_chroma_client"], state["_gemini_client"]) == (None, None)
    assert (state["_chroma_host"], state["_chroma_port"]) == ("localhost", 8000)


@pytest.mark.parametrize(
    ("text", "reward", "has_format", "correct"),
    [
        ("Answer: The Panthers", 1.0, 1.0, 1.0),
        ("I searched.\nAnswer:  panthers!", 1.0, 1.0, 1.0),
        ("Answer: the a panthers", 1.0, 1.0, 1.0),
        ("Answer: 308", 1.0, 1.0, 1.0),
        ("Answer: Panther", 0.0, 1.0, 0.0),
        ("Panthers", -0.1, 0.0, 0.0),
        ("answer: Panthers", -0.1, 0.0, 0.0),
        ("Answer: Panthers or Answer: 308", -0.1, 0.0, 0.0),
        ("", -0.1, 0.0, 0.0),
    ],
)
def test_reward(text: str, reward: float, has_format: float, correct: float):
    grade = TextAnswerReward(["Panthers", "308"])
    history: list[Message] = [{"role": "user", "content": "Answer: Panthers"}]
    assert asyncio.run(grade(history)) == (0.0, {"format": 0.0, "correct": 0.0})
    history.append({"role": "assistant", "content": text})
    got, metrics = asyncio.run(grade([*history, {"role": "tool", "content": "Answer: 308"}]))
    assert got == pytest.approx(reward)
    assert metrics == {"format": has_format, "correct": correct}
    assert normalize_answer("A  Theatre, an Example") == "theatre example"


def test_rows_of_search_r1_and_others():
    question = {"question": "Who?", "data_source": "nq"}
    for answer in (
        {"golden_answers": ["x", "y"]},
        {"golden_answers": np.array(["x", "y"], dtype=object)},
        {"reward_model": {"ground_truth": {"target": np.array(["x", "y"], dtype=object)}}},
        {"reward_model": {"ground_truth": ["x", "y"], "style": "rule"}, "golden_answers": ["z"]},
        {"answers": {"text": ["x", "y"], "answer_start": [1, 2]}},
    ):
        expected = {"question": "Who?", "answer": ["x", "y"], "data_source": "nq"}
        assert process_single_row(question | answer) == expected
        assert process_single_row(pd.Series(question | answer)) == expected
    assert process_single_row({"question": "When?", "answer": 1999})["answer"] == ["1999"]
    for row in (
        {"answer": "x"},
        question,
        question | {"answer": []},
        question | {"answer": [""]},
        3,
    ):
        with pytest.raises(DataFormatError):
            process_single_row(row, "FILE:3")


def test_questions_of_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = pd.DataFrame(
        {
            "question": ["Who?", "Why?"],
            "golden_answers": [["x"], ["y", "z"]],
            "data_source": ["nq", "hotpotqa"],
        }
    )
    (tmp_path / "r1").mkdir()
    rows.to_parquet(tmp_path / "r1" / "train.parquet")
    rows[:1].to_parquet(tmp_path / "r1" / "test.parquet")
    found = read_questions(str(tmp_path / "r1"))
    assert [q["answer"] for q in found] == [["x"], ["y", "z"]]
    assert len(read_questions(str(tmp_path / "r1"), "test")) == 1
    asked = [
        {"question": "Who?", "answers": [{"text": "Ada"}, {"text": "Ada"}]},
        {"question": "No?", "answers": []},
    ]
    squad = {"data": [{"title": "T", "paragraphs": [{"context": "Ada was born.", "qas": asked}]}]}
    (tmp_path / "s.json").write_text(json.dumps(squad))
    assert read_questions(str(tmp_path / "s.json")) == [
        {"question": "Who?", "answer": ["Ada"], "data_source": "s"}
    ]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"dataset=FOLDER \(train.parquet, test.parquet\)"):
        read_questions("search_r1")
    for path in ("nowhere.jsonl", str(tmp_path / "empty.jsonl")):
        (tmp_path / "empty.jsonl").write_text("")
        with pytest.raises(DataError, match="expected"):
            read_questions(path)


class Script(TokenCompleter):
    """A policy that gives prepared answers, and keeps the prompts."""

    def __init__(self, renderer: Any, *texts: str) -> None:
        self.renderer, self.texts = renderer, list(texts)
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> Any:
        text = f"{self.texts.pop(0)}<|im_end|>"
        self.prompts.append(model_input.to_ints())
        self.answers.append(self.renderer.tokenizer.encode(text, add_special_tokens=False))
        return TokensWithLogprobs(self.answers[-1], [0.0] * len(self.answers[-1]))


CALL = '<tool_call>\n{{"name": "search", "arguments": {{"query_list": ["{}"]}}}}\n</tool_call>'


def test_an_episode_of_two_searches(model: str, search_tool: LocalSearchTool):
    (row,) = [q for q in read_questions("example") if q["data_source"] == "two_hop"][:1]
    about = "Saltash"
    builder = SearchEnvGroupBuilder(row, model, None, 3, 2, search_tool)
    renderer = get_renderer("qwen3_instruct", get_tokenizer(model))

    def episode(*texts: str) -> tuple[float, dict[str, Any], Script]:
        envs = asyncio.run(builder.make_envs())
        assert len(envs) == 2
        policy = Script(renderer, *texts)
        trajectory = asyncio.run(do_single_rollout(policy, envs[0]))
        metrics: dict[str, Any] = {}
        for turn in trajectory.transitions:
            metrics |= turn.metrics
        return trajectory.reward, metrics, policy

    right = f"Answer: {row['answer'][0]}"
    reward, metrics, policy = episode(CALL.format(about), CALL.format("Ada"), right)
    assert reward == 1.0
    assert metrics["correct"] == 1.0
    assert len(policy.prompts) == 3
    # Token for token: a prompt extends the one before it and its answer, so that an episode is
    # one training sequence.
    for t in range(2):
        seen = policy.prompts[t] + policy.answers[t]
        assert policy.prompts[t + 1][: len(seen)] == seen
    text = renderer.tokenizer.decode(policy.prompts[1])
    assert SEARCH_TASK_INSTRUCTIONS in text
    assert f"Query: {about}\nDocument 1:\n" in text
    assert episode("Answer: nothing")[0] == 0.0
    assert episode("I do not know")[0] == pytest.approx(-0.1)
    # The limit of answers ends the episode, which is graded then.
    reward, metrics, _ = episode(*[CALL.format(about)] * 3)
    assert reward == pytest.approx(-0.1)
    assert metrics["max_turns"] == 1.0
    assert pickle.loads(pickle.dumps(builder)).logging_tags() == ["two_hop"]


def dataset_builder(model: str, **more: Any) -> SearchR1DatasetBuilder:
    values = {"dataset": "example", "batch_size": 4, "group_size": 2, "num_test": 10} | more
    return SearchR1DatasetBuilder(model_name_for_tokenizer=model, **values)


def test_datasets(model: str, shared_dir: Path):
    train_set, test_set = asyncio.run(dataset_builder(model)())
    again, _ = asyncio.run(dataset_builder(model)())
    other, _ = asyncio.run(dataset_builder(model, seed=1)())
    assert test_set is not None
    assert (len(train_set), len(test_set)) == (-(-465 // 4), 1)
    first = [group.datum["question"] for group in train_set.get_batch(0)]  # type: ignore[attr-defined]
    assert first == [group.datum["question"] for group in again.get_batch(0)]  # type: ignore[attr-defined]
    assert first != [group.datum["question"] for group in other.get_batch(0)]  # type: ignore[attr-defined]
    # A file of questions with their paragraphs needs no corpus; test questions are held out of it.
    xquad = str(shared_dir / "data" / "xquad" / "xquad.de.json")
    training, test = dataset_builder(model, dataset=xquad, num_test=100).questions()
    assert len(test) == 100
    assert len(training) + len(test) <= 1190
    assert not {q["question"] for q in training} & {q["question"] for q in test}
    builders = list(train_set.get_batch(0))
    assert len(SearchRLDataset(builders, 3)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "search_r1"}, "corpus: got none, and dataset=search_r1 has no documents"),
        ({"corpus": "a", "index_path": "b"}, "corpus=a and index_path=b"),
        ({"corpus": "nowhere"}, "corpus: there is no file or folder nowhere"),
        ({"index_path": "nowhere"}, "index_path: there is no file or folder nowhere"),
        ({"chroma_host": "h", "corpus": "a"}, "corpus=a and chroma_host=h"),
    ],
)
def test_wrong_settings_are_errors_before_anything_is_read(settings: dict[str, Any], message: str):
    with pytest.raises((ConfigurationError, DataError), match=message):
        dataset_builder("no-model", **settings).check()


def test_training_and_evaluation(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two steps with the untrained small model, then its checkpoint is evaluated twice."""
    log = tmp_path / "run"
    small: dict[str, Any] = {"max_tokens": 4, "max_turns": 2, "device": "cpu", "dtype": "float32"}
    sizes = {"groups_per_batch": 2, "group_size": 2, "num_test": 2, "max_steps": 1, "lora_rank": 2}
    config = train.CLIConfig(
        model_name=model, log_path=str(log), behavior_if_log_dir_exists="raise", **small, **sizes
    )
    asyncio.run(train.main(config))
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert any("env/all/reward/total" in row for row in rows)
    checkpoints = (log / "checkpoints.jsonl").read_text().splitlines()
    path = json.loads(checkpoints[-1])["sampler_path"]
    evaluation = offline_eval.CLIConfig(model_path=path, max_eval_samples=3, **small)
    asyncio.run(offline_eval.main(evaluation))
    printed = capsys.readouterr().out
    for source in ("one_hop", "two_hop"):
        assert f"{source}: accuracy 0.000 (0 of 3)" in printed
