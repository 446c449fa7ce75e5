"""Data sets and evaluations of self-distillation, from made-up local copies (6 s)."""

from __future__ import annotations

import asyncio
import json

import datasets
import pytest

from recipes.sdft import benchmark, run_continual_learning
from recipes.sdft import datasets as data
from recipes.sdft import eval as grading
from recipes.sdft import train as program
from recipes.start import chat_data
from tinker_cookbook.exceptions import ConfigurationError, DataError, DataValidationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments


def science(i, domain="Chemistry", level="L3", kind="mcq-4-choices"):
    choices = {"label": ["A", "B"], "text": ["no", str(i)]}
    row = {"question": f"What is {i}?", "answerKey": "B", "type": kind, "choices": choices}
    return {**row, "domain": domain, "details": {"level": level}}


SCIENCE = [*map(science, range(10)), science(90, "Physics"), science(91, level="L1")]
SCIENCE.append(science(92, kind="open"))
GOLDEN = ["Action: get", 'Action Input: {"a": 1}']
TOOLS = [{"prompt": f"Do {i}.", "golden_response": GOLDEN} for i in range(10)]
OF_HUB = [{"instruction": f"Do {i}.", "output": "\n".join(GOLDEN)} for i in range(10)]


def write(path, rows, saved):
    path.parent.mkdir(parents=True, exist_ok=True)
    if saved:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("saved", [True, False], ids=["save_to_disk", "jsonl"])
def test_local_copies(tmp_path, saved):
    questions, answers, test_q, _ = data.load_sciknoweval(
        data_path=write(tmp_path / "s", SCIENCE, saved)
        if saved
        else write(tmp_path / "s.jsonl", SCIENCE, saved)
    )
    assert (len(questions), len(test_q), set(answers)) == (9, 1, {"B"})
    assert all("\n\nA: no\nB: " in q and q.endswith("option.") for q in questions)
    for rows in (TOOLS, OF_HUB):
        name = f"{'prompt' in rows[0]}{'' if saved else '.jsonl'}"
        questions, answers, test_q, _ = data.load_toolalpaca(write(tmp_path / name, rows, saved))
        assert sorted([*questions, *test_q]) == [f"Do {i}." for i in range(10)]
        assert set(answers) == {"\n".join(GOLDEN)}


def test_what_is_missing_is_said(tmp_path, monkeypatch, stories_model):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = write(tmp_path / "s.jsonl", SCIENCE, False)
    given = [f"model_name={stories_model}", "renderer_name=role_colon"]
    for words, error, message in (
        (["dataset=sciknoweval"], DataError, "SciKnowEval.*dataset_path=FILE.jsonl"),
        (["dataset=toolalpaca"], DataError, "ToolAlpaca.*dataset_path=FILE.jsonl"),
        (
            ["dataset=sciknoweval", f"dataset_path={path}", "sciknoweval_domain=Art"],
            DataValidationError,
            "sciknoweval_domain: got 'Art'.*Chemistry, Physics",
        ),
    ):
        cli = parse_arguments(program.CLIConfig, [*given, *words])
        with pytest.raises(error, match=message):
            asyncio.run(program.load_provider(cli))
    cli = parse_arguments(
        program.CLIConfig, [*given, "dataset=sciknoweval", f"dataset_path={path}"]
    )
    train, test = asyncio.run(program.load_provider(cli))
    assert (len(train), len(train.get_batch(1)[1]), len(test)) == (2, 1, 1)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("<answer>A</answer> no, <answer>\nB\n</answer>", "B"),
        ("<think>The answer is A.</think> The answer is C.", "C"),
        ("A or B?\nD", "D"),
        ("I take B, not Ab", "B"),
        ("none", "none"),
    ],
)
def test_letters(text, letter):
    assert grading.extract_xml_answer(text) == letter


def test_actions():
    right = 'Action: a\nAction Input: {"x": 1}\nAction: b\nAction Input: {"y": 2}'
    golden = [
        {"Action": "b", "Action_Input": '{"y": 2}'},
        {"Action": "a", "Action_Input": '{"x": 1}'},
    ]
    wrong = [right.replace("2", "3"), right.replace("Action: b", ""), right.replace("}", "")]
    assert grading.evaluate_tooluse_correctness([right, *wrong], [golden] * 4) == [1, 0, 0, 0]


def test_reasoning_as_thinking():
    text = "<reasoning>\nSo.\n</reasoning>\n<answer>\nC\n</answer>"
    convert = data._convert_golden_answer_to_thinking_format
    assert convert(text) == "So.\n\nThe answer is C."
    assert convert(text, for_sft=True) == "<think>\nSo.\n</think>\n\nThe answer is C."
    assert convert("plain") == "plain"


@pytest.fixture
def paper(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "1?"}]
    row = {"messages": messages, "output_text": "<reasoning>1</reasoning><answer>A</answer>"}
    made = {
        "science_data/train_data": [row] * 2,
        "science_data/eval_data": [{"prompt": messages, "answer": "A"}],
        "tooluse_data/train_data": TOOLS[:2],
        "tooluse_data/eval_data": [
            {"prompt": "Do.", "golden_answer": [{"Action": "get", "Action_Input": "{}"}]}
        ],
    }
    for name, rows in made.items():
        write(tmp_path / "data" / name, rows, saved=True)
    return str(tmp_path / "data")


def test_the_papers_copies(paper, stories_model):
    questions, golden, prompts, letters = data.load_science_from_arrow(
        f"{paper}/science_data", thinking_format=True
    )
    assert (questions, golden, letters) == (["1?"] * 2, ["1\n\nThe answer is A."] * 2, ["A"])
    assert prompts[0][0]["content"] == grading.SCIENCE_SYSTEM_PROMPT_THINKING
    cli = parse_arguments(
        benchmark.BenchmarkConfig,
        [f"model_name={stories_model}", "renderer_name=role_colon", f"data_dir={paper}"],
    )
    builder = data.TooluseArrowSFTBuilder(
        common_config=chat_data(cli, 2, None), data_dir=f"{paper}/tooluse_data"
    )
    (datum, _) = builder()[0].get_batch(0)
    text = get_renderer("role_colon", get_tokenizer(stories_model)).tokenizer.decode(
        datum.model_input.to_ints()
    )
    assert "Do 0." in text
    assert "Action Input" in text


def test_the_programs(paper, tmp_path, stories_model, capsys):
    given = [f"model_name={stories_model}", "renderer_name=role_colon", f"data_dir={paper}"]
    given += ["backend=local", "device=cpu", "max_tokens=100", f"log_root={tmp_path / 'runs'}"]
    words = [*given, "dataset=tooluse", "max_steps=1", "sft_max_steps=1", "sft_batch_size=2"]
    asyncio.run(benchmark.main(parse_arguments(benchmark.BenchmarkConfig, words)))
    found = json.loads((tmp_path / "runs" / "benchmark_summary_tooluse.json").read_text())
    assert {name: row["tooluse/num_total"] for name, row in found.items()} == {
        "base": 1.0, "sft": 1.0, "sdft": 1.0,
    }  # fmt: skip
    config = run_continual_learning.ExperimentConfig
    asyncio.run(run_continual_learning.main(parse_arguments(config, [*given, "dry_run=true"])))
    assert "stage2_sdft_topk_lr1e-03: science" in capsys.readouterr().out
    for wrong, message in (
        ("stages=2", "stage1_sft_lr5e-04 has no finished run"),
        ("methods=sft,sdft_is", "methods: got 'sdft_is'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            asyncio.run(run_continual_learning.main(parse_arguments(config, [*given, wrong])))
