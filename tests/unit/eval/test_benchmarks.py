"""Each benchmark reads the files of its authors and grades right and wrong answers."""

from __future__ import annotations

import asyncio
import csv
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tinker_cookbook.eval.benchmarks import (
    REGISTRY,
    BenchmarkConfig,
    Example,
    ExampleBenchmark,
    find_benchmark,
    mt_bench,
)
from tinker_cookbook.eval.benchmarks._common import load_benchmark_dataset
from tinker_cookbook.eval.benchmarks.choices import few_shot_text, load_split
from tinker_cookbook.exceptions import (
    BenchmarkNotFoundError,
    DataError,
    DataFormatError,
    DataValidationError,
    EvalGradingError,
)

SINGLE = sorted(name for name, b in REGISTRY.items() if isinstance(b, ExampleBenchmark))
QUESTION = {"question": "Which one?", "options": ["red", "blue", "both", "none", "other"]}
GPQA = {
    "Question": "Which particle?",
    "Correct Answer": "muon",
    "Incorrect Answer 1": "quark",
    "Incorrect Answer 2": "gluon",
    "Incorrect Answer 3": "photon",
}
# Name of the benchmark, name of the file, its rows, a right answer, a wrong answer.
FORMATS = [
    ("gsm8k", "test.jsonl", {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, "2", "3"),
    ("math500", "math500.jsonl", {"problem": "p", "answer": "x^2"}, r"\boxed{x^2}", r"\boxed{x}"),
    ("aime", "aime_2025.jsonl", {"problem": "p", "answer": "073"}, "73", "37"),
    ("aime_2024", "aime_2024.jsonl", {"problem": "p", "answer": 204}, "204", "240"),
    ("aime_2026", "aime_2026.jsonl", {"problem": "p", "answer": 204}, r"\boxed{204}", "2"),
    (
        "hmmt_feb_2025",
        "feb_2025.jsonl",
        {"problem": "p", "answer": r"\frac{1}{\sqrt{2}}"},
        r"\boxed{\sqrt{2}/2}",
        r"\boxed{\sqrt{2}}",
    ),
    ("mmlu_pro", "test.jsonl", {**QUESTION, "answer_index": 4}, "(E)", "(A)"),
    ("mmlu_pro", "test.jsonl", {**QUESTION, "answer": "B", "question_id": 7}, "blue", "red"),
    ("supergpqa", "all.jsonl", {**QUESTION, "answer_letter": "C", "uuid": "u"}, "both", "(D)"),
    ("gpqa", "gpqa_diamond.csv", GPQA, "The answer is muon.", "The answer is photon."),
]


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".csv":
        with open(file, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _example(name: str, data_path: Path) -> tuple[ExampleBenchmark, Example]:
    benchmark = REGISTRY[name]
    assert isinstance(benchmark, ExampleBenchmark)
    return benchmark, benchmark.load_examples(BenchmarkConfig(data_path=str(data_path)))[0]


@pytest.mark.parametrize(("name", "file", "row", "right", "wrong"), FORMATS)
def test_a_format_is_read_and_graded(tmp_path, name, file, row, right, wrong):
    _write(tmp_path / file, [row])
    benchmark, example = _example(name, tmp_path)
    assert example.gold is not None
    assert benchmark.grade(example.gold, example).reward == 1
    assert benchmark.grade(right, example).reward == 1
    assert benchmark.grade(wrong, example).reward == 0
    assert benchmark.grade("", example).reward == 0


IFEVAL = (["punctuation:no_comma"], [{}])
# Class of an environment, its arguments, a right answer, a wrong answer.
MESSAGE_ENVS = [
    ("aime.AIMEMessageEnv", ("p", 73), r"\boxed{073}", r"\boxed{-73}"),
    ("gsm8k.GSM8KMessageEnv", ("1+1?", "2"), "It is 2.", "3"),
    ("math500.MATH500MessageEnv", ("p", "x^2"), r"\boxed{x x}", r"\boxed{x}"),
    ("ceval.CEvalMessageEnv", ("p", "B", "law"), "Answer: B", "Answer: C"),
    ("gpqa.GPQAMessageEnv", ("p", "B"), "(B)", "(C)"),
    ("mmlu_redux.MMLUReduxMessageEnv", ("p", "A"), "A", "B"),
    ("mmlu_pro.MMLUProMessageEnv", ("p", "E", "ABCDE"), "Answer: E", "Answer: F"),
    ("supergpqa.SuperGPQAMessageEnv", ("p", "E", "ABCDE"), "Answer: E", "Answer: A"),
    ("ifeval.IFEvalMessageEnv", ([{"role": "user", "content": "p"}], *IFEVAL), "a b", "a, b"),
    ("mbpp.MBPPMessageEnv", ("p", "p", ["assert f(1) == 2"]), "def f(x): return 2", "f = 1"),
]


@pytest.mark.parametrize(("path", "arguments", "right", "wrong"), MESSAGE_ENVS)
def test_an_environment_of_messages_grades_as_its_benchmark(path, arguments, right, wrong):
    module, name = path.split(".")
    if module == "ifeval":
        pytest.importorskip("if_verifiable")
    kind = getattr(importlib.import_module(f"tinker_cookbook.eval.benchmarks.{module}"), name)

    async def check() -> None:
        thought = f"<think>{wrong}</think>{right}"
        for answer, reward in ((thought, 1.0), (f"<think>{right}</think>{wrong}", 0.0)):
            env = kind(*arguments, example_id="mine")
            assert (await env.initial_observation())[-1]["content"] in ("p", "1+1?")
            result = await env.step({"role": "assistant", "content": answer})
            assert (result.reward, result.metrics["correct"]) == (reward, reward), answer
            assert (result.episode_done, result.next_messages) == (True, [])

    asyncio.run(check())


def test_the_choices_of_gpqa_are_in_the_same_order_in_every_run(tmp_path):
    rows = [{**GPQA, "Question": f"Which particle is {i}?"} for i in range(40)]
    _write(tmp_path / "gpqa" / "gpqa_diamond.csv", rows)
    config = BenchmarkConfig(data_path=str(tmp_path))
    positions = [e.expected for e in REGISTRY["gpqa"].load_examples(config)]  # type: ignore[attr-defined]
    assert positions == [e.expected for e in REGISTRY["gpqa"].load_examples(config)]  # type: ignore[attr-defined]
    assert set(positions) == set("ABCD")


def test_the_original_mmlu_files_have_no_header(tmp_path):
    for split, rows in (("dev", 6), ("test", 1)):
        (tmp_path / "mmlu" / split).mkdir(parents=True)
        (tmp_path / "mmlu" / split / f"anatomy_{split}.csv").write_text(
            "".join(f'"{split} {i}, which?",a,b,c,d,B\n' for i in range(rows)), "utf-8"
        )
    benchmark = REGISTRY["mmlu_anatomy"]
    assert isinstance(benchmark, ExampleBenchmark)
    config = BenchmarkConfig(data_path=str(tmp_path), scoring="logprob")
    (example,) = benchmark.load_examples(config)
    assert example.expected == "B"
    assert example.choices == (" A", " B", " C", " D")
    assert example.answer_index == 1
    # Five solved questions, then the question.
    assert example.context.count("Answer: B\n\n") == 5
    assert example.context.endswith("test 0, which?\nA. a\nB. b\nC. c\nD. d\nAnswer:")
    assert example.context.startswith(few_shot_text("anatomy", [])[:60])
    assert benchmark.grade("b", example).reward == 1
    with pytest.raises(DataValidationError, match="expected a folder"):
        _example("mmlu_anatomy", tmp_path / "mmlu" / "test" / "anatomy_test.csv")


def test_only_questions_of_mmlu_redux_without_an_error_count(tmp_path):
    rows = [
        {"question": f"q{i}", "choices": "['a', 'b', 'c', 'd']", "answer": 2, "error_type": kind}
        for i, kind in enumerate(["OK ", "wrong_groundtruth", "ok"])
    ]
    _write(tmp_path / "mmlu_redux" / "mmlu_virology.csv", rows)
    examples = REGISTRY["mmlu_redux"].load_examples(  # type: ignore[attr-defined]
        BenchmarkConfig(data_path=str(tmp_path))
    )
    assert [e.logs["input"] for e in examples] == ["q0", "q2"]
    assert {e.logs["group"] for e in examples} == {"virology"}


def test_ceval_uses_the_validation_split(tmp_path):
    row = {"id": 0, "question": "哪个?", "A": "一", "B": "二", "C": "三", "D": "四", "answer": "D"}
    _write(tmp_path / "ceval" / "val" / "law_val.csv", [row])
    benchmark, example = _example("ceval", tmp_path)
    assert benchmark.grade("答案是 (D)", example).reward == 1
    assert benchmark.grade("三", example).reward == 0


def test_two_choices_with_the_same_text_need_a_letter(tmp_path):
    _write(tmp_path / "test.jsonl", [{**QUESTION, "options": ["x", "x", "y"], "answer_index": 1}])
    benchmark, example = _example("mmlu_pro", tmp_path)
    assert benchmark.grade("x", example).reward == 0
    assert benchmark.grade("B", example).reward == 1


BBH = [
    (
        "boolean_expressions",
        "not True is",
        "False",
        "It is not True, so the answer is False.",
        "True",
    ),
    ("formal_fallacies", "Valid?", "invalid", "The argument is not valid.", "The answer is valid."),
    ("navigate", "Return?", "Yes", "Yes, since each step is undone.", "No."),
    ("object_counting", "How many?", "8", "3 + 5 = 8. The answer is 8.", "The answer is 3."),
    ("dyck_languages", "[ [", "] ]", "The answer is ]].", "The answer is ] ] ]."),
    ("word_sorting", "Sort", "abc xyz", "Answer: ABC, xyz", "The answer is xyz abc."),
    ("snarks", "Which?\nOptions:\n(A) a\n(B) b", "(B)", "So B is correct.", "The answer is (A)."),
]


@pytest.mark.parametrize(("task", "question", "target", "right", "wrong"), BBH)
def test_each_kind_of_target_of_bbh_is_compared(tmp_path, task, question, target, right, wrong):
    rows = {"canary": "", "examples": [{"input": question, "target": target}]}
    (tmp_path / f"{task}.json").write_text(json.dumps(rows), "utf-8")
    benchmark, example = _example(f"bbh_{task}", tmp_path)
    assert benchmark.grade(right, example).reward == 1
    assert benchmark.grade(wrong, example).reward == 0
    assert benchmark.grade("", example).reward == 0


def test_by_log_likelihood_only_questions_of_bbh_with_few_answers_count(tmp_path):
    for task, _, _, _, _ in BBH:
        examples = [{"input": q, "target": t} for k, q, t, _, _ in BBH if k == task]
        (tmp_path / f"{task}.json").write_text(json.dumps({"examples": examples}), "utf-8")
    config = BenchmarkConfig(data_path=str(tmp_path), scoring="logprob")
    counts = {task: len(REGISTRY[f"bbh_{task}"].load_examples(config)) for task, *_ in BBH}  # type: ignore[attr-defined]
    assert counts == {
        "boolean_expressions": 1,
        "formal_fallacies": 1,
        "navigate": 1,
        "object_counting": 0,
        "dyck_languages": 0,
        "word_sorting": 0,
        "snarks": 1,
    }
    (example,) = REGISTRY["bbh_navigate"].load_examples(config)  # type: ignore[attr-defined]
    assert example.choices == (" Yes", " No")
    assert example.context == "Q: Return?\nA:"


def test_without_the_hub_and_without_data_the_error_names_data_path(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("gsm8k", "mmlu", "aime"):
        with pytest.raises(DataError, match="data_path="):
            REGISTRY[name].examples(BenchmarkConfig())  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="data_path="):
        load_benchmark_dataset("openai/gsm8k", "main")


WRONG_ROWS = [
    ("gsm8k", "test.jsonl", {"q": "1+1?"}, "columns q, expected question"),
    *(
        ("gsm8k", "test.jsonl", {"question": "q", "answer": answer}, "expected a number, or a sol")
        for answer in ("8 clips\n####", "It is large.", "He had 5. Then 3 more. So 8.")
    ),
    ("math500", "test.jsonl", {"problem": "p", "solution": "It is 5."}, "answer: got None for 'p'"),
    ("aime", "aime/2025.jsonl", {"problem": "p", "answer": "12a"}, "integer from 0 to 999"),
]


def test_rows_without_the_expected_columns_are_an_error(tmp_path):
    with pytest.raises(DataValidationError, match=r"test\.jsonl .*subfolder gsm8k/"):
        _example("gsm8k", tmp_path)
    for name, file, row, words in WRONG_ROWS:
        _write(tmp_path / file, [row])
        with pytest.raises(DataFormatError, match=words):
            _example(name, tmp_path)
    (tmp_path / "law_test.csv").write_text("q,a,b,c\n", "utf-8")
    with pytest.raises(DataFormatError, match="row 1 has 4 columns, expected 6"):
        list(load_split("test", None, str(tmp_path)))


def test_an_unknown_task_is_an_error_with_the_nearest_name():
    with pytest.raises(BenchmarkNotFoundError, match="did you mean 'gsm8k'"):
        find_benchmark("gsm8")
    with pytest.raises(BenchmarkNotFoundError, match="did you mean 'mmlu_anatomy'"):
        find_benchmark("mmlu_anatomi")
    # The 84 subjects and tasks are not listed.
    with pytest.raises(BenchmarkNotFoundError, match=r"ifeval.*bbh_…, mmlu_…;") as caught:
        find_benchmark("swe_bench")
    assert "anatomy" not in str(caught.value)


class _Renderer:
    """Tokens are the characters' numbers."""

    def build_generation_prompt(self, messages):
        return [dict(message) for message in messages]

    def get_stop_sequences(self):
        return ["\n"]

    def parse_response(self, tokens):
        return {"role": "assistant", "content": "".join(map(chr, tokens))}, True


def _talk(judge, references=()) -> Any:
    env = mt_bench.MTBenchEnv(
        "1",
        ["Why?", "Shorter!"],
        _Renderer(),
        judge,
        "humanities",
        references,  # type: ignore[arg-type]
    )

    async def run():
        first, _ = await env.initial_observation()
        step = await env.step([ord(c) for c in "Because."])
        assert not step.episode_done
        assert [m["content"] for m in first] == ["Why?"]
        assert [m["content"] for m in step.next_observation] == ["Why?", "Because.", "Shorter!"]
        return await env.step([ord("B")], extra={"stop_reason": "length"})

    return asyncio.run(run())


def test_the_judge_rates_both_answers_of_a_conversation():
    read: list[str] = []

    async def judge(messages):
        read.append(messages[0]["content"])
        return {"role": "assistant", "content": f"Fine. Rating: [[{9 - len(read)}]]"}

    final = _talk(judge, ["R1", "R2"])
    assert final.reward == pytest.approx(0.75)
    assert final.metrics["turn_1/rating"] == 8
    assert final.metrics["turn_2/rating"] == 7
    assert final.metrics["max_tokens_reached"] == 1
    # The first rating is without the second question.
    assert "Shorter!" not in read[0]
    assert "R1" in read[0]
    assert read[1].index("Because.") < read[1].index("Shorter!") < read[1].index("]\nB\n\n")
    result = REGISTRY["mt_bench"].aggregate([final.reward], [final.metrics])
    assert result.metrics["humanities/rating"] == pytest.approx(7.5)


@pytest.mark.parametrize("verdict", ["I like it.", "[[11]]", "[[0]]", "Rating: 8", ""])
def test_a_verdict_that_cannot_be_read_is_an_error(verdict: str):
    async def judge(messages):
        return {"role": "assistant", "content": verdict}

    with pytest.raises(EvalGradingError, match="expected a rating from 1 to 10"):
        _talk(judge)


# Right answers that equal the answer of another example in another form.
EXPECTED_EXCEPTIONS = {
    # The other answer is "x=5", this one is 5.
    "math500": ["math500/test/algebra/1837.json"],
}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gsm8k", 1319),
        ("mmlu_anatomy", 135),
        ("bbh", 6511),
        # 15 s.
        pytest.param("mmlu", 14042, marks=pytest.mark.slow),
        # 10 s: five hundred comparisons by math_verify.
        pytest.param("math500", 500, marks=pytest.mark.slow),
        pytest.param("mmlu_redux", 5330, marks=pytest.mark.slow),
    ],
)
def test_every_gold_answer_is_right_and_a_foreign_one_wrong(shared_dir, name, count):
    benchmark, config = REGISTRY[name], BenchmarkConfig(data_path=str(shared_dir / "data"))
    assert isinstance(benchmark, ExampleBenchmark)
    if name == "mmlu_redux" and not (shared_dir / "data" / name).is_dir():
        pytest.skip("no copy of MMLU-Redux")
    assert len(benchmark.examples(config)) == count
    wrong = [sentence.partition(":")[0] for sentence in benchmark.validate(config)]
    assert wrong == EXPECTED_EXCEPTIONS.get(name, [])


@pytest.mark.shared
def test_mt_bench_has_eighty_conversations(shared_dir):
    builder = mt_bench.MTBenchBenchmarkBuilder()
    rows = builder.load_rows(BenchmarkConfig(data_path=str(shared_dir / "data")))
    assert len(rows) == 80
    assert {len(row["questions"]) for row in rows} == {2}
