"""Every environment pays 1 for a gold answer and nothing for rubbish; no model takes part."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest
from scripted_policy import COMMON, RUBBISH, play

from recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder, ArithmeticEnv
from recipes.math_rl.datasets import MathDatasetBuilder
from recipes.math_rl.math_env import Gsm8kEnv, MathEnv
from recipes.math_rl.problems import Problem, problem_of, problems_from_hub, read_problems
from recipes.math_rl.reasoning_gym_env import ReasoningGymDatasetBuilder
from recipes.multiplayer_rl.guess_number.env import Game, GuessNumberDatasetBuilder
from recipes.multiplayer_rl.twenty_questions.env import (
    AnswererConfig,
    Rules,
    TwentyQuestionsDatasetBuilder,
)
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
)

pytestmark = pytest.mark.usefixtures("bytes_registered")


# --- arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("7", 1.0), ("3 + 4 = 7.", 1.0), ("8", 0.0), ("7 or 8", 0.0), (RUBBISH, -0.1), ("", -0.1)],
)
def test_arithmetic(renderer, answer, reward):
    assert play(ArithmeticEnv(3, 4, renderer), answer).reward == pytest.approx(reward)


def test_every_sum_has_a_gold_answer_and_held_out_ones_are_not_trained_on(renderer):
    builder = ArithmeticDatasetBuilder(**COMMON, n_batches=40, num_test=10, seed=3)
    train, test = asyncio.run(builder())
    assert test is not None
    assert len(train) == 40

    def pairs(dataset) -> list[tuple[int, int]]:
        groups = [g for i in range(len(dataset)) for g in dataset.get_batch(i)]
        envs = [asyncio.run(group.make_env(0)) for group in groups]
        for env in envs[:20]:
            assert play(env, env.get_reference_answer()).reward == 1
        return [(env.x, env.y) for env in envs]

    trained, held_out = pairs(train), pairs(test)
    assert len(held_out) == len({tuple(sorted(pair)) for pair in held_out}) == 10
    assert not {tuple(sorted(p)) for p in held_out} & {tuple(sorted(p)) for p in trained}
    assert all(len(set(trained[i : i + 4])) == 4 for i in range(0, 160, 4))
    assert pairs(asyncio.run(builder())[0]) == trained
    train.set_epoch(5)
    assert pairs(train) == trained


def test_too_many_held_out_sums_are_refused():
    with pytest.raises(ConfigurationError, match="num_test: got 28, expected at most 27"):
        ArithmeticDatasetBuilder(**COMMON, num_test=28).check()


# --- GSM8K and MATH --------------------------------------------------------------------------

GSM8K_ROW = {
    "question": "A box holds 12 eggs. How many eggs are in 1,000 boxes?",
    "answer": "A box holds 12.\n1,000 boxes hold 12*1000=<<12*1000=12000>>12000.\n#### 12,000",
}
MATH_ROW = {
    "problem": "Simplify $\\sqrt{8}$.",
    "solution": "As $8 = 4 \\cdot 2$, it is $\\boxed{2\\sqrt{2}}$.",
}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (GSM8K_ROW["answer"], 1.0),
        ("#### 12000.00", 1.0),
        ("It is 12,000 eggs.", 0.9),
        ("so \\boxed{12000} of them, 1 each", 0.9),
        ("#### 12", 0.0),
        (RUBBISH, -0.1),
    ],
)
def test_gsm8k(renderer, answer, reward):
    problem = problem_of(GSM8K_ROW, "row")
    env = Gsm8kEnv(problem.question, problem.answer, renderer)
    assert play(env, answer).reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (MATH_ROW["solution"], 1.0),
        ("\\boxed{\\sqrt{8}}", 1.0),
        ("\\boxed{3}", 0.0),
        ("2\\sqrt{2}", -0.1),
        (RUBBISH, -0.1),
    ],
)
def test_math(renderer, answer, reward):
    problem = problem_of(MATH_ROW, "row")
    env = MathEnv(problem.question, problem.answer, renderer, grading_timeout_seconds=30)
    assert play(env, answer).reward == pytest.approx(reward)


@pytest.mark.parametrize(("name", "env"), [("gsm8k", Gsm8kEnv), ("math", MathEnv)])
def test_real_problems_pay_their_own_solutions(renderer, shared_dir, name, env):
    file = {"gsm8k": "gsm8k/test.jsonl", "math": "math/test5000.jsonl"}[name]
    lines = (shared_dir / "data" / file).read_text().splitlines()
    for line in lines[:: len(lines) // 40]:
        row = json.loads(line)
        problem = problem_of(row, "row")
        game = env(problem.question, problem.answer, renderer, grading_timeout_seconds=30)
        solution = row["answer"] if name == "gsm8k" else row["solution"]
        assert play(game, solution).reward == 1, row
        assert play(game, RUBBISH).reward < 0


def test_local_files_in_place_of_the_hub(tmp_path):
    rows = [{"question": f"What is {i} times 1?", "answer": str(i)} for i in range(10)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))

    def questions(dataset) -> list[str]:
        groups = [g for i in range(len(dataset)) for g in dataset.get_batch(i)]
        return [asyncio.run(group.make_env(0)).problem for group in groups]

    for settings in (
        {"dataset_path": str(tmp_path)},
        {"dataset_path": f"{tmp_path}/train.jsonl", "test_path": f"{tmp_path}/test.jsonl"},
        {"dataset_path": f"{tmp_path}/train.jsonl", "test_path": str(tmp_path)},
    ):
        train, test = asyncio.run(MathDatasetBuilder(env="gsm8k", **COMMON, **settings)())
        assert test is not None
        # What is evaluated on is not trained on, though the file has it.
        assert sorted(questions(train)) == [row["question"] for row in rows[3:]]
        assert sorted(questions(test)) == [row["question"] for row in rows[:3]]
        assert [len(train.get_batch(i)) for i in range(len(train))] == [4, 3]
        before = questions(train)
        train.set_epoch(1)
        assert sorted(questions(train)) == sorted(before) != questions(train)
    (tmp_path / "words.jsonl").write_text('{"question": "q", "answer": "5 eggs. Then 3."}')
    with pytest.raises(DataFormatError, match="expected a number, or a solution"):
        asyncio.run(
            MathDatasetBuilder(env="gsm8k", **COMMON, dataset_path=f"{tmp_path}/words.jsonl")()
        )
    train, test = asyncio.run(
        MathDatasetBuilder(env="gsm8k", **COMMON, dataset_path=f"{tmp_path}/train.jsonl")()
    )
    assert (len(questions(train)), test) == (10, None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "What?"}', "rows.jsonl:1: got question 'What\\?' and answer None"),
        ('{"answer": "7"}', "got question None"),
        ('{"question": "What?", "answer": ["7"]}', r"answer \['7'\]"),
        ('{"question": "What?", "answer": "7 days ####"}', "answer '7 days ####'"),
        ("[1]", "got question None"),
        ("", "got no problem"),
    ],
)
def test_invalid_rows_are_refused(tmp_path, line, words):
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=words):
        read_problems(str(tmp_path / "rows.jsonl"))


def test_answers_in_every_place_where_datasets_have_them():
    for row, answer in (
        ({"question": "q", "answer": "words\n#### 5"}, "5"),
        ({"problem": "q", "answer": 5}, "5"),
        ({"question": "q", "final_answer": "5", "topic": "x"}, "5"),
        ({"problem": "q", "solution": "\\boxed{5}"}, "5"),
    ):
        assert problem_of(row, "row") == Problem("q", answer)
    with pytest.raises(DataFormatError):
        problem_of({"question": "q", "answer": True}, "row")


def test_without_the_hub_it_is_said_what_is_missing_and_what_helps(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        problems_from_hub("gsm8k", test=False)
    for words in ("env=gsm8k needs openai/gsm8k", "HF_HUB_OFFLINE", "dataset_path=FILE.jsonl"):
        assert words in str(caught.value)
    assert "conversations" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env": "math", "dataset_path": "no-such-file.jsonl"}, "dataset_path: there is no file"),
    ],
)
def test_invalid_math_settings_are_refused(settings, words):
    with pytest.raises((ConfigurationError, DataValidationError), match=words):
        MathDatasetBuilder(**COMMON, **settings).check()


# --- all of them -----------------------------------------------------------------------------

BUILDERS = {
    "arithmetic": lambda folder: ArithmeticDatasetBuilder(**COMMON),
    "math": lambda folder: MathDatasetBuilder(
        env="math", **COMMON, dataset_path=f"{folder}/p.jsonl"
    ),
    "reasoning_gym": lambda folder: ReasoningGymDatasetBuilder(**COMMON, generator="chain_sum"),
    "guess_number": lambda folder: GuessNumberDatasetBuilder(**COMMON, game=Game()),
    "twenty_questions": lambda folder: TwentyQuestionsDatasetBuilder(
        **COMMON, answerer=AnswererConfig(model_name="x"), rules=Rules()
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_groups_pickle_and_batches_repeat(tmp_path, name):
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, [MATH_ROW] * 9)))
    builder = BUILDERS[name](tmp_path)
    builder.check()
    train, _ = asyncio.run(builder())
    last = train.get_batch(len(train) - 1)
    assert pickle.dumps(train.get_batch(0)) == pickle.dumps(train.get_batch(0))
    assert last
    with pytest.raises(IndexError):
        train.get_batch(len(train))
    copy = pickle.loads(pickle.dumps(train.get_batch(0)))
    if name == "twenty_questions":  # whose environment would load the answerer
        return
    envs = asyncio.run(copy[0].make_envs())
    assert len(envs) == 2
    assert asyncio.run(envs[0].initial_observation())[0].length > 10
