"""Rubrics: files, rewards, and answers that the judge cannot grade (under 2 s)."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from scripted_policy import Script, play

from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    ConfigurationError,
    DataFormatError,
    EvalGradingError,
)
from tinker_cookbook.judges.judge import Judge, Judgement
from tinker_cookbook.judges.settings import JudgeSettings
from tinker_cookbook.recipes.rubric import generate_data
from tinker_cookbook.recipes.rubric.data import (
    LabelledAnswer,
    PrometheusDatapointListBuilder,
    Rubric,
    RubricBasedDatapoint,
    RubricDatapointListBuilderFromJsonl,
    load_labelled,
)
from tinker_cookbook.recipes.rubric.env import (
    RubricGradedDatasetBuilder,
    RubricGradedEnv,
    RubricGradedEnvGroupBuilder,
    judge_agreement,
)
from tinker_cookbook.recipes.rubric.train import CLIConfig
from tinker_cookbook.recipes.start import example_data
from tinker_cookbook.renderers import get_text_content
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.rollouts.errors import RolloutFailedError
from tinker_cookbook.rl.rollouts.strategy import LeaveOutUngraded

pytestmark = pytest.mark.usefixtures("bytes_registered")

POINT = RubricBasedDatapoint(
    convo=[{"role": "user", "content": "Name two animals."}],
    rubric_items=[Rubric("Is there a cat?"), Rubric("Is there a dog?")],
)


class WordJudge(Judge):
    """Looks for the animal of the criterion in the answer; cannot read an answer with a frog."""

    uses_labels = True

    async def __call__(self, messages, read):
        text = get_text_content(messages[0])
        answer = text.partition("Answer to grade:\n")[2].partition("\n\nCriterion:")[0]
        if "frog" in answer:
            raise EvalGradingError("I do not know frogs")
        animal = "cat" if "Is there a cat?" in text else "dog"
        return Judgement(float(animal in answer), "words")


class Writer(MessageCompleter):
    """A judge that writes its score, as in the official cookbook."""

    def __init__(self, *texts):
        self.texts, self.prompts = list(texts), []

    async def __call__(self, messages):
        self.prompts.append(get_text_content(messages[0]))
        return {"role": "assistant", "content": self.texts.pop(0)}


def test_the_reward_is_the_mean_of_the_criteria_less_the_format(renderer):
    trajectory = play(RubricGradedEnv(renderer, POINT, WordJudge()), "A cat and a cow.")
    assert trajectory.reward == 0.5
    assert trajectory.transitions[0].metrics == {"format": 1.0, "rubric_score": 0.5}
    cut = play(RubricGradedEnv(renderer, POINT, WordJudge()), "A cat, a dog, a", cut=True)
    assert cut.reward == pytest.approx(1.0 - 0.1)


def test_a_completer_is_a_judge_that_writes_its_score(renderer, capsys):
    judge = Writer("fine: <score>0.5</score>", "<score>1</score>")
    trajectory = play(RubricGradedEnv(renderer, POINT, judge, debug=True), "A dog.")
    assert trajectory.reward == 0.75
    assert "Please output your score" in judge.prompts[0]
    assert "Answer to grade" in capsys.readouterr().out
    with pytest.raises(EvalGradingError, match=r"matches <score>"):
        play(RubricGradedEnv(renderer, POINT, Writer("good!", "good!")), "A dog.")


def group(renderer, judge, size=4):
    return RubricGradedEnvGroupBuilder(renderer, POINT, judge, size)


class EachALine(Script):
    """Gives each member of a group the next line."""

    async def sample_many(self, model_input, stop, num_samples, *, max_tokens=None):
        return [await self(model_input, stop) for _ in range(num_samples)]


def rollout(renderer, *answers, judge=None):
    builder = group(renderer, judge or WordJudge(), len(answers))
    return asyncio.run(do_group_rollout(builder, EachALine(*answers), strategy=LeaveOutUngraded()))


def test_an_answer_without_a_grade_is_left_out_and_not_scored_0(renderer):
    found = rollout(renderer, "A cat.", "A frog.", "A cat and a dog.", "None.")
    assert found.get_total_rewards() == [0.5, 1.0, 0.0]
    (error,) = found.rollout_errors
    assert error.error_type == "EvalGradingError"
    assert "I do not know frogs" in error.error_message


def test_a_group_without_two_grades_is_skipped(renderer):
    with pytest.raises(AllTrajectoriesFailedError, match="only 1/3"):
        rollout(renderer, "A frog.", "A frog.", "A cat.")


def test_another_error_ends_the_run(renderer):
    class Broken(Judge):
        async def __call__(self, messages, read):
            raise KeyError("a bug")

    with pytest.raises(RolloutFailedError, match="a bug"):
        rollout(renderer, "A cat.", "A dog.", judge=Broken())
    assert not LeaveOutUngraded().catches_group_errors


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"rows.jsonl:1: not JSON"),
        ({"convo": POINT.convo}, r"rows.jsonl:1: KeyError\('rubric_items'\)"),
        ({"convo": POINT.convo, "rubric_items": []}, "a criterion in rubric_items"),
        ({"convo": POINT.convo, "rubric_items": [{"rubric": "x"}]}, "argument 'rubric'"),
        (
            {"convo": POINT.convo, "rubric_items": [{"rubric_str": "x", "extraction_regex": "x"}]},
            "expected a group around the score",
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(DataFormatError, match=message):
        RubricDatapointListBuilderFromJsonl(jsonl_path=str(path))()


def test_the_example_labels_are_balanced():
    held_out = load_labelled(example_data("rubric_labelled.jsonl"))
    trained = load_labelled(example_data("rubric_judge_train.jsonl"))
    assert (len(trained), len(held_out)) == (480, 160)
    texts = [{get_text_content(one.convo[-1]) for one in part} for part in (held_out, trained)]
    assert not texts[0] & texts[1]
    for part in (held_out, trained):
        for i in range(2):
            assert sum(one.labels[i] for one in part) == len(part) / 2


def test_agreement_leaves_out_what_the_judge_cannot_grade():
    answers = ["A cat.", "A frog.", "A cow."]
    labelled = [
        LabelledAnswer(
            [*POINT.convo, {"role": "assistant", "content": text}],
            POINT.rubric_items,
            [float("cat" in text), 0.0],
        )
        for text in answers
    ]
    found = asyncio.run(judge_agreement(WordJudge(), labelled))
    assert (found.num_judged, found.num_failed, found.accuracy) == (4, 2, 1.0)


def test_a_judge_below_min_kappa_does_not_train(stories_model, tmp_path, capsys):
    few = example_data("rubric_labelled.jsonl").read_text().splitlines()[:8]
    (tmp_path / "labelled.jsonl").write_text("\n".join(few))
    train_data = RubricDatapointListBuilderFromJsonl(
        jsonl_path=str(example_data("rubric_train.jsonl"))
    )
    builder = RubricGradedDatasetBuilder(
        renderer_name="role_colon",
        model_name_for_tokenizer=stories_model,
        batch_size=2,
        train_group_size=2,
        train_datapoint_list_builder=train_data,
        judge=JudgeSettings(
            model_name=stories_model, renderer_name="role_colon", device="cpu", dtype="float32"
        ),
        labelled_path=str(tmp_path / "labelled.jsonl"),
        min_kappa=0.9,
    )
    with pytest.raises(ConfigurationError, match="min_kappa: got a judge with Cohen's kappa"):
        asyncio.run(builder())
    shown = capsys.readouterr().out
    assert "judged 16 labelled answers" in shown
    assert "Cohen's kappa" in shown


def test_settings_that_contradict_each_other():
    with pytest.raises(ConfigurationError, match="grader_llm_name: got none with grader_url"):
        CLIConfig(grader_url="http://localhost:8000/v1").judge_settings()
    with pytest.raises(ConfigurationError, match="min_kappa"):
        RubricGradedDatasetBuilder(
            renderer_name="role_colon",
            model_name_for_tokenizer="m",
            batch_size=2,
            train_group_size=2,
            train_datapoint_list_builder=RubricDatapointListBuilderFromJsonl(jsonl_path="x"),
            min_kappa=0.5,
        ).check()


def test_sums_as_in_the_official_cookbook(tmp_path):
    train, test = generate_data.generate_dataset(5, 2, seed=1, write_dir=str(tmp_path))
    points = [RubricDatapointListBuilderFromJsonl(jsonl_path=path)() for path in (train, test)]
    assert [len(part) for part in points] == [5, 2]
    one = generate_data.generate_one(random.Random(0))
    a, b = (int(x) for x in get_text_content(one.convo[-1])[8:-1].split(" + "))
    assert str(a + b) in one.rubric_items[0].rubric_str


def test_feedback_collection_from_a_file(tmp_path):
    row = {"orig_instruction": "Explain.", "orig_criteria": "Clear?", "orig_reference_answer": "R"}
    row |= {f"orig_score{i}_description": f"step {i}" for i in range(1, 6)}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (point,) = PrometheusDatapointListBuilder(data_path=str(path))()
    assert "5: step 5" in point.rubric_items[0].rubric_str
    assert point.rubric_items[0].extract_score("<score>4.0</score>") == 4
