"""Running benchmarks: requests, grading, errors, files and what a later run reuses (under 5 s)."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from tinker_cookbook.eval.benchmarks import (
    BenchmarkConfig,
    Example,
    ExampleBenchmark,
    Grade,
    StoredTrajectory,
    load_result,
    load_summary,
    load_trajectories,
    print_trajectory,
    regrade_trajectories,
    run_benchmarks,
)
from tinker_cookbook.eval.run.answers import summarize
from tinker_cookbook.eval.run.logprob_run import grade_choices
from tinker_cookbook.eval.run.runner import evaluate
from tinker_cookbook.eval.run.sources import (
    Answer,
    AnswerSource,
    ContextOverflowError,
    Prompt,
    sampling_description,
)
from tinker_cookbook.exceptions import (
    BenchmarkNotFoundError,
    ConfigurationError,
    DataValidationError,
    EvalError,
)
from tinker_cookbook.sandbox import SandboxUnavailableError


class Sums(ExampleBenchmark):
    """What is i + i?"""

    name = "sums"
    recommended_system_prompt = "Answer with a number."

    def __init__(self, count: int = 5) -> None:
        self.count, self.graded = count, 0

    def load_examples(self, config):
        return [
            Example(
                f"sum_{i}",
                [{"role": "user", "content": f"{i} + {i}"}],
                2 * i,
                str(2 * i),
                {"expected": 2 * i},
            )
            for i in range(self.count)
        ]

    def grade(self, response, example):
        self.graded += 1
        right = response.strip() == str(example.expected)
        return Grade(float(right), {"length": len(response)}, {"extracted": response.strip()})


class Scripted(AnswerSource):
    """Answers by a function of the user's message and the number of the sample."""

    def __init__(self, answer, config=None, model_id="model-1"):
        self.answer, self.model_id = answer, model_id
        self.config = config or BenchmarkConfig()
        self.requests: list[tuple[str, int, int | None]] = []

    def description(self):
        return sampling_description(self.config)

    def render(self, messages):
        text = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        return Prompt(text, messages[-1]["content"], len(text))

    async def sample(self, prompt, num_samples, seed):
        self.requests.append((prompt.value, num_samples, seed))
        await asyncio.sleep(0)
        return [self.answer(prompt.value, i) for i in range(num_samples)]


def right(question, sample=0):
    return Answer(str(2 * int(question.split()[0])), 3, False)


def wrong(question, sample=0):
    return Answer("no", 1, False)


def run(benchmark, source, **settings):
    config = BenchmarkConfig(**settings)
    source.config = config
    return asyncio.run(evaluate(benchmark, source, config))


def test_partial_rewards_that_differ_are_mixed_and_partly_right(capsys):
    def row(problem, reward):
        return StoredTrajectory(
            idx=problem, benchmark="b", example_id=str(problem), reward=reward, turns=[]
        )

    rows = [row(0, 0.0), row(0, 0.33), row(1, 0.5), row(1, 0.5)]
    result = summarize("b", rows)
    assert (result.metrics["mixed_share"], result.metrics["never_solved"]) == (0.5, 2)
    for one in rows[:2]:
        print_trajectory(one)
    assert "wrong, reward 0 " in (shown := capsys.readouterr().out)
    assert "partly right, reward 0.33" in shown


def test_several_answers_to_a_problem_are_one_request_and_get_their_statistics(tmp_path):
    # Problem i is answered right by i of 4 samples.
    source = Scripted(lambda q, i: right(q) if i < int(q.split()[0]) else wrong(q))
    result = run(Sums(), source, num_samples=4, save_dir=str(tmp_path))
    assert sorted(source.requests) == [(f"{i} + {i}", 4, None) for i in range(5)]
    assert (result.num_examples, result.num_correct, result.score) == (20, 10, 0.5)
    assert result.pass_at_k == {
        1: 0.5,
        2: pytest.approx((0 + 3 / 6 + 5 / 6 + 1 + 1) / 5),
        3: pytest.approx((0 + 3 / 4 + 1 + 1 + 1) / 5),
        4: 0.8,
    }
    assert result.metrics["num_problems"] == 5
    assert (result.metrics["mixed_share"], result.metrics["never_solved"]) == (0.6, 1)
    # Two of four: a tie. One of four: "no" has three votes.
    assert result.metrics["maj@4"] == pytest.approx((0 + 0 + 0.5 + 1 + 1) / 5)
    low, high = result.metrics["ci_low"], result.metrics["ci_high"]
    # Clustered: much wider than the interval of 20 independent answers, [0.30, 0.70].
    assert low < 0.25
    assert high > 0.75
    assert load_result(str(tmp_path), "sums") == result
    assert load_summary(str(tmp_path))["sums"]["score"] == 0.5


def test_stored_answers_are_reused_and_more_can_be_added(tmp_path):
    first, second = Scripted(right), Scripted(wrong)
    run(Sums(), first, max_examples=3, save_dir=str(tmp_path))
    assert len(first.requests) == 3
    result = run(Sums(), second, max_examples=4, num_samples=2, save_dir=str(tmp_path))
    # Only the missing samples are requested: one of the first three problems, two of the fourth.
    assert sorted(n for _, n, _ in second.requests) == [1, 1, 1, 2]
    assert (result.num_correct, result.num_examples) == (3, 8)
    assert [(r.idx, r.sample) for r in load_trajectories(str(tmp_path), "sums")] == [
        (i, j) for i in range(4) for j in range(2)
    ]


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.0}, {"max_tokens": 5}, {"seed": 1}, {"top_p": 0.9}, {"system_prompt": "x"}],
)
def test_other_settings_reuse_nothing(tmp_path, change):
    run(Sums(), Scripted(right), save_dir=str(tmp_path))
    again = Scripted(wrong)
    result = run(Sums(), again, save_dir=str(tmp_path), **change)
    assert len(again.requests) == 5
    assert result.num_correct == 0


def test_readers_never_mix_answers_to_different_prompts(tmp_path):
    run(Sums(), Scripted(wrong), save_dir=str(tmp_path))
    run(Sums(), Scripted(right), save_dir=str(tmp_path), system_prompt="x", max_examples=2)
    assert [row.reward for row in load_trajectories(str(tmp_path), "sums")] == [1.0, 1.0]


def test_an_interrupted_run_has_no_result_of_another_checkpoint(tmp_path):
    run(Sums(), Scripted(right), save_dir=str(tmp_path))

    def interrupted(question, sample):
        raise ConfigurationError("stopped")

    with pytest.raises(ConfigurationError, match="stopped"):
        run(Sums(), Scripted(interrupted, model_id="model-2"), save_dir=str(tmp_path))
    assert load_result(str(tmp_path), "sums") is None


def test_another_checkpoint_reuses_nothing_and_the_first_ones_answers_stay(tmp_path):
    run(Sums(), Scripted(right), save_dir=str(tmp_path))
    result = run(Sums(), Scripted(wrong, model_id="model-2"), save_dir=str(tmp_path))
    assert result.score == 0
    rows = load_trajectories(str(tmp_path), "sums")
    assert {row.turns[-1].content for row in rows} == {"no"}
    # Back at the first model: nothing is sampled.
    again = Scripted(wrong)
    assert run(Sums(), again, save_dir=str(tmp_path)).score == 1
    assert again.requests == []
    assert {row.reward for row in load_trajectories(str(tmp_path), "sums")} == {1.0}


def test_another_grader_grades_the_stored_responses_again(tmp_path):
    run(Sums(), Scripted(right), save_dir=str(tmp_path))
    benchmark = Sums()
    benchmark.grader_version = "2"
    benchmark.grade = lambda response, example: Grade(0.5)
    again = Scripted(wrong)
    result = run(benchmark, again, save_dir=str(tmp_path))
    assert (result.score, result.num_correct, again.requests) == (0.5, 0, [])
    # Once graded, nothing is left to do.
    benchmark.grade = lambda response, example: Grade(0.0)
    assert run(benchmark, again, save_dir=str(tmp_path)).score == 0.5


def test_a_function_of_the_user_grades_text_without_thinking(tmp_path):
    seen = []

    def grade(response, logs):
        seen.append((response, logs["expected"]))
        return 1.0

    source = Scripted(lambda q, i: Answer("4", 9, False, thinking="hm"))
    result = run(Sums(2), source, grade_fn=grade, save_dir=str(tmp_path))
    assert (result.score, sorted(seen)) == (1.0, [("4", 0), ("4", 2)])
    row = load_trajectories(str(tmp_path), "sums")[0]
    assert row.turns[-1].metadata == {"thinking": "hm"}


def test_a_grader_that_raises_is_an_error_and_its_answer_is_kept(tmp_path):
    benchmark = Sums()

    def grade(response, example):
        if example.example_id == "sum_2":
            raise ValueError("cannot parse")
        return Sums.grade(benchmark, response, example)

    benchmark.grade = grade
    result = run(benchmark, Scripted(right), save_dir=str(tmp_path))
    # Four of four graded ones are right; the error is no wrong answer.
    assert (result.score, result.num_errors, result.num_correct) == (1.0, 1, 4)
    (row,) = load_trajectories(str(tmp_path), "sums", errors_only=True)
    assert row.error == "grading: ValueError: cannot parse"
    assert row.turns[-1].content == "4"
    again = Scripted(wrong)
    assert run(Sums(), again, save_dir=str(tmp_path)).num_errors == 0
    assert again.requests == []


def test_a_request_that_fails_is_an_error_and_is_repeated(tmp_path):
    def answer(question, sample):
        if question.startswith("3"):
            raise RuntimeError("server is busy")
        return right(question)

    result = run(Sums(), Scripted(answer), save_dir=str(tmp_path))
    assert (result.num_errors, result.score, result.num_examples) == (1, 1.0, 5)
    again = Scripted(right)
    assert run(Sums(), again, save_dir=str(tmp_path)).num_errors == 0
    assert [question for question, _, _ in again.requests] == ["3 + 3"]


def test_a_run_whose_requests_all_fail_ends_early(tmp_path):
    def answer(question, sample):
        raise RuntimeError("wrong key")

    with pytest.raises(EvalError, match=r"first 8 requests failed.*RuntimeError: wrong key"):
        run(Sums(50), Scripted(answer), concurrency=2, save_dir=str(tmp_path))


def test_requests_that_failed_before_do_not_end_the_next_run(tmp_path):
    def answer(question, sample):
        if int(question.split()[0]) >= 5:
            raise RuntimeError("too long")
        return right(question)

    for _ in range(2):
        result = run(Sums(15), Scripted(answer), concurrency=1, save_dir=str(tmp_path))
        assert (result.num_correct, result.num_errors) == (5, 10)


def test_a_missing_package_of_the_grader_ends_the_run():
    benchmark = Sums()

    def grade(response, example):
        raise ConfigurationError("pip install something")

    benchmark.grade = grade
    with pytest.raises(ConfigurationError, match="pip install"):
        run(benchmark, Scripted(right))


def test_truncated_answers_and_prompts_without_room_are_counted(tmp_path):
    def answer(question, sample):
        if question.startswith("1"):
            raise ContextOverflowError("the prompt has 9 tokens")
        if question.startswith("2"):
            return Answer("4", 5, truncated=True)
        return right(question)

    result = run(Sums(), Scripted(answer), save_dir=str(tmp_path))
    assert (result.num_truncated, result.num_errors) == (2, 0)
    # The truncated answer happens to be right; the overflow has no answer.
    assert (result.score, result.num_correct) == (0.8, 4)
    assert (result.num_completed, result.score_completed) == (3, 1.0)
    again = Scripted(right)
    run(Sums(), again, save_dir=str(tmp_path))
    assert again.requests == []


def test_graders_run_in_parallel_and_off_the_event_loop():
    benchmark = Sums(6)
    together = threading.Barrier(3, timeout=60)

    def grade(response, example):
        together.wait()
        assert threading.current_thread() is not threading.main_thread()
        return Grade(1.0)

    benchmark.grade = grade
    assert run(benchmark, Scripted(right)).score == 1


def test_a_grader_that_never_returns_is_an_error():
    benchmark = Sums(2)
    benchmark.recommended_timeout = 0.1
    release = threading.Event()
    benchmark.grade = lambda response, example: release.wait()  # pyright: ignore[reportAttributeAccessIssue]
    result = run(benchmark, Scripted(right), timeout_seconds=0.1)
    release.set()
    assert result.num_errors == 2


def test_a_line_torn_by_kill_is_repaired(tmp_path):
    run(Sums(), Scripted(right), max_examples=3, save_dir=str(tmp_path))
    file = tmp_path / "sums" / "trajectories.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-40])
    again = Scripted(right)
    run(Sums(), again, max_examples=3, save_dir=str(tmp_path))
    assert len(again.requests) == 1
    assert [json.loads(line)["reward"] for line in file.read_text().splitlines()] == [1, 1, 1]


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    from tinker_cookbook.run.lock import RunLock

    with RunLock(tmp_path / "sums"), pytest.raises(ConfigurationError, match="in use by another"):
        run(Sums(), Scripted(right), save_dir=str(tmp_path))


def test_each_problem_has_a_seed_that_depends_on_its_id_only():
    few, many = Scripted(right), Scripted(right)
    run(Sums(2), few, seed=7)
    run(Sums(5), many, seed=7)
    seeds = {question: seed for question, _, seed in many.requests}
    assert len(set(seeds.values())) == 5
    assert all(seeds[question] == seed for question, _, seed in few.requests)


def test_regrading_keeps_the_rows_and_writes_the_result(tmp_path):
    run(Sums(), Scripted(right), save_dir=str(tmp_path))
    result = regrade_trajectories(
        str(tmp_path), "sums", lambda response, logs: float(int(response) > 3)
    )
    assert (result.score, load_result(str(tmp_path), "sums")) == (0.6, result)
    wrong_ones = load_trajectories(str(tmp_path), "sums", incorrect_only=True)
    assert [row.example_id for row in wrong_ones] == ["sum_0", "sum_1"]
    assert len(load_trajectories(str(tmp_path), "sums", correct_only=True)) == 3
    # The benchmark's own grader knows that these are not its rewards.
    assert run(Sums(), Scripted(wrong), save_dir=str(tmp_path)).score == 1.0


def test_an_answer_is_shown_with_its_brackets(tmp_path, capsys):
    run(Sums(1), Scripted(lambda q, i: Answer("[b]0[/b] :100:", 4, False)), save_dir=str(tmp_path))
    print_trajectory(load_trajectories(str(tmp_path), "sums")[0])
    shown = capsys.readouterr().out
    assert "sums 0 (sum_0), sample 0: wrong, reward 0" in shown
    assert "assistant (4 tokens)\n[b]0[/b] :100:" in shown
    assert "system (0" not in shown
    assert "Answer with a number." in shown


def test_what_cannot_be(stories_model, monkeypatch):
    class Judged(Sums):
        requires_judge = True

    class Sandboxed(Sums):
        requires_sandbox = True

    with pytest.raises(ConfigurationError, match="set judge_sampling_client"):
        run(Judged(), Scripted(right))

    def no_sandbox() -> None:
        raise SandboxUnavailableError("install bubblewrap")

    monkeypatch.setattr("tinker_cookbook.sandbox.available_tier", no_sandbox)
    with pytest.raises(ConfigurationError, match="cannot isolate them: install bubblewrap"):
        run(Sandboxed(), Scripted(right))
    with pytest.raises(ConfigurationError, match="cannot score given texts"):
        run(Sums(), Scripted(right), scoring="logprob")
    with pytest.raises(ConfigurationError, match="scoring: got 'x'"):
        BenchmarkConfig(scoring="x")  # type: ignore[arg-type]
    twice = Sums()
    twice.load_examples = lambda config: Sums().load_examples(config)[:1] * 2
    with pytest.raises(DataValidationError, match="example_id 'sum_0' twice"):
        run(twice, Scripted(right))
    with pytest.raises(BenchmarkNotFoundError, match="did you mean 'gsm8k'"):
        asyncio.run(run_benchmarks(["gsmk8"], None, None))  # type: ignore[arg-type]


def test_a_long_choice_is_judged_by_its_log_probability_a_byte():
    row = StoredTrajectory(0, "choices")
    example = Example("x", [], 1, None, choices=(" a", " a long one"), answer_index=1, context="c")
    grade_choices(row, example, [-2.0, -6.0])
    assert (row.reward, row.metrics["acc_norm"]) == (0.0, 1.0)
    assert row.turns[-1].content == " a"
