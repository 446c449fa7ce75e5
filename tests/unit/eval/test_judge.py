"""MT-Bench with a small real model as model and as judge (4 s)."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tinker_cookbook.eval.__main__ import Config, main
from tinker_cookbook.eval.benchmarks import BenchmarkConfig, load_trajectories, run_benchmark
from tinker_cookbook.exceptions import EvalError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="module")
def client(stories_model):
    from tinker_cookbook.backends import connect

    connection = connect("local", device="cpu", dtype="float32")
    yield connection.service.create_sampling_client(base_model=stories_model).result()
    connection.close()


@pytest.fixture
def conversations(tmp_path):
    """A folder with ``mt_bench/question.jsonl``: ten conversations."""
    (tmp_path / "mt_bench").mkdir()
    rows = [
        {"question_id": i, "category": "writing", "turns": [f"Who is {i}?", "And then?"]}
        for i in range(10)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "mt_bench" / "question.jsonl").write_text(text)
    return tmp_path


class Rating(RoleColonRenderer):
    """Whatever the judge samples is a rating; ``num_read`` counts its answers."""

    def __init__(self, tokenizer, rating):
        super().__init__(tokenizer)
        self.rating, self.num_read = rating, 0

    def parse_response(self, tokens):
        assert tokens
        self.num_read += 1
        return {"role": "assistant", "content": f"Rating: [[{self.rating}]]"}, True


@pytest.mark.slow
def test_ratings_are_reused_for_the_same_judge_only(client, stories_model, conversations):
    tokenizer = get_tokenizer(stories_model)
    renderer = get_renderer("role_colon", tokenizer)

    def score(judge, judge_id):
        config = BenchmarkConfig(
            max_examples=2, max_tokens=8, seed=1, data_path=str(conversations),
            save_dir=str(conversations / "out"), judge_sampling_client=client,
            judge_renderer=judge, judge_id=judge_id,
        )  # fmt: skip
        return asyncio.run(run_benchmark("mt_bench", client, renderer, config)).score

    judge = Rating(tokenizer, 7)
    assert score(judge, "first") == pytest.approx(0.7)
    # Two answers of two conversations, in a context of 512 tokens.
    assert judge.num_read == 4
    assert score(judge, "first") == pytest.approx(0.7)
    assert judge.num_read == 4
    assert score(Rating(tokenizer, 3), "second") == pytest.approx(0.3)
    assert score(Rating(tokenizer, 4), None) == pytest.approx(0.4)


def config_of(model, folder, **settings):
    return Config(
        tasks="mt_bench", model_name=model, renderer_name="role_colon", judge_name=model,
        judge_renderer_name="role_colon", max_tokens=8, seed=1, data_path=str(folder),
        out=str(folder / "out"), backend="local", device="cpu", dtype="float32", **settings,
    )  # fmt: skip


def test_verdicts_that_cannot_be_read_are_errors_with_their_conversation(
    stories_model, conversations, capsys
):
    asyncio.run(main(config_of(stories_model, conversations, limit=2)))
    rows = load_trajectories(str(conversations / "out"), "mt_bench")
    assert len(rows) == 2
    for row in rows:
        assert row.error is not None
        assert re.match("grading: EvalGradingError: .*judge: got", row.error)
        assert [turn.role for turn in row.turns] == ["user", "assistant"] * 2
    printed = " ".join(capsys.readouterr().out.split())
    assert f"judge: {stories_model}" in printed
    assert "mt_bench: 2 answers failed and do not count in the score" in printed
    assert "The first error: grading: EvalGradingError: " in printed
    assert "mt_bench 2 - -" in printed  # no score without a grade


def test_a_judge_that_is_never_read_ends_the_run(stories_model, conversations):
    message = "mt_bench: the first 8 answers could not be graded, .*a judge that often fails at"
    with pytest.raises(EvalError, match=message):
        asyncio.run(main(config_of(stories_model, conversations)))
