"""Environment with one answer to a conversation, graded by a judge that reads a rubric."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import chz

from tinker_cookbook.completers import MessageCompleter, StopCondition
from tinker_cookbook.exceptions import ConfigurationError, EvalGradingError
from tinker_cookbook.judges.agreement import Agreement, measure_agreement
from tinker_cookbook.judges.judge import Judge, Judgement, TextJudge
from tinker_cookbook.judges.settings import JudgeMode, JudgeSettings, LazyJudge
from tinker_cookbook.recipes.rubric.data import (
    Conversation,
    LabelledAnswer,
    Rubric,
    RubricBasedDatapoint,
    RubricDatapointListBuilder,
    load_labelled,
)
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Logs,
    Observation,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import at_least, number
from tinker_cookbook.utils.terminal import get_console, print_line

logger = logging.getLogger(__name__)

Grader = Judge | MessageCompleter
"""A judge, or a completer whose text has the score, as in the official cookbook."""


def prompt_for(judge: Judge, rubric: Rubric, convo: Conversation) -> Conversation:
    """Returns what the judge reads to grade the last message of ``convo``."""
    if judge.uses_labels:
        return rubric.get_label_prompt(convo)
    return rubric.get_grader_prompt(convo)


async def grade(judge: Judge, convo: Conversation, rubrics: Sequence[Rubric]) -> list[Judgement]:
    """Grades the last message of ``convo`` by each criterion.

    The prompts differ only behind the conversation, so a local judge reads that once.

    Raises:
        EvalGradingError: The judge gave no score for one of them.
    """

    async def one(rubric: Rubric) -> Judgement:
        return await judge(prompt_for(judge, rubric, convo), rubric.extract_score)

    return await gather_or_cancel(one(rubric) for rubric in rubrics)


class RubricGradedEnv(Env):
    """One answer; its reward is the mean score plus ``format_coef * (format - 1)``.

    ``format`` is 1 if the answer ended with the renderer's stop sequence, else 0. If the judge has
    no score, the step raises ``EvalGradingError``: ``LeaveOutUngraded`` then leaves the answer out
    of its group. With ``debug`` prompts, answers and judgements are printed.
    """

    def __init__(
        self,
        renderer: Renderer,
        datapoint: RubricBasedDatapoint,
        grader_llm: Grader,
        debug: bool = False,
        format_coef: float = 0.1,
    ) -> None:
        self.renderer, self.datapoint, self.debug = renderer, datapoint, debug
        self.convo, self.rubric_items = datapoint.convo, datapoint.rubric_items
        self.messages = list(datapoint.convo)  # for teachers and the record
        self.grader_llm, self.format_coef = grader_llm, format_coef
        self._judge = grader_llm if isinstance(grader_llm, Judge) else TextJudge(grader_llm)

    @property
    def stop_condition(self) -> StopCondition:
        """The renderer's stop sequences."""
        return self.renderer.get_stop_sequences()

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Returns the rendered conversation and the stop sequences."""
        prompt = await asyncio.to_thread(self.renderer.build_generation_prompt, self.convo)
        return prompt, self.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Has the answer graded and ends the episode."""
        message, ending = await asyncio.to_thread(self.renderer.parse_response, action)
        self.messages.append(message)
        # The judge reads only the text: thinking and tool calls are not part of the answer.
        answer = Message(role="assistant", content=get_text_content(message))
        found = await grade(self._judge, [*self.convo, answer], self.rubric_items)
        scores = [judgement.score for judgement in found]
        mean, valid = sum(scores) / len(scores), float(ending.is_stop_sequence)
        logs: Logs = {"answer": answer["content"] if isinstance(answer["content"], str) else ""}
        for i, (rubric, judgement) in enumerate(zip(self.rubric_items, found, strict=True), 1):
            logs[f"criterion {i}"] = (
                f"{judgement.score:.3f}  {rubric.rubric_str[:200]}  [{judgement.text[:500]}]"
            )
        if self.debug:
            self._print(answer, found)
        return StepResult.final(
            mean + self.format_coef * (valid - 1),
            self.stop_condition,
            metrics={"format": valid, "rubric_score": mean},
            logs=logs,
        )

    def _print(self, answer: Message, found: Sequence[Judgement]) -> None:
        console = get_console()
        for title, text in (
            ("conversation", json.dumps(self.convo, indent=2, ensure_ascii=False)),
            ("answer of the policy", get_text_content(answer)),
        ):
            console.rule(title)
            console.print(text, markup=False, highlight=False)
        for rubric, judgement in zip(self.rubric_items, found, strict=True):
            console.rule("what the judge reads")
            (prompt,) = prompt_for(self._judge, rubric, [*self.convo, answer])
            console.print(get_text_content(prompt), markup=False, highlight=False)
            console.rule(f"score {judgement.score:.3f}, from")
            console.print(judgement.text, markup=False, highlight=False)


@dataclass(frozen=True)
class RubricGradedEnvGroupBuilder(EnvGroupBuilder):
    """Answers to the same conversation; a ``LazyJudge`` pickles, for groups in other processes."""

    renderer: Renderer
    datapoint: RubricBasedDatapoint
    grader_llm: Grader
    group_size: int
    format_coef: float = 0.1

    async def make_envs(self) -> Sequence[RubricGradedEnv]:
        """Makes ``group_size`` equal environments."""
        return [
            RubricGradedEnv(
                self.renderer, self.datapoint, self.grader_llm, format_coef=self.format_coef
            )
            for _ in range(self.group_size)
        ]

    def logging_tags(self) -> list[str]:
        """Returns the kind of task."""
        return ["rubric"]


class RubricGradedDataset(ProblemDataset[RubricBasedDatapoint]):
    """Batches of groups over datapoints; the last batch may be smaller."""

    def __init__(
        self,
        renderer: Renderer,
        batch_size: int,
        group_size: int,
        datapoints: Sequence[RubricBasedDatapoint],
        grader_llm: Grader,
        *,
        format_coef: float = 0.1,
    ) -> None:
        self.datapoints = datapoints
        super().__init__(
            datapoints,
            lambda point: RubricGradedEnvGroupBuilder(
                renderer, point, grader_llm, group_size, format_coef
            ),
            batch_size,
        )


@chz.chz
class RubricGradedDatasetBuilder(RLDatasetBuilder):
    """Conversations with rubrics, and the judge.

    ``judge`` has all settings of the judge; without it ``base_url``, ``grader_llm_name``,
    ``grader_renderer_name`` and ``grader_mode`` describe it.
    """

    renderer_name: str = chz.field(doc="Chat format of the policy")
    model_name_for_tokenizer: str = chz.field(doc="Model whose tokenizer is used")
    batch_size: int = chz.field(validator=at_least(1), doc="Conversations per step")
    train_group_size: int = chz.field(validator=at_least(1), doc="Answers to a conversation")
    test_group_size: int = number(1, "Answers to a conversation in evaluation", low=1)
    train_datapoint_list_builder: RubricDatapointListBuilder = chz.field(doc="Training data")
    test_datapoint_list_builder: RubricDatapointListBuilder | None = chz.field(
        default=None, doc="Held-out data"
    )
    base_url: str | None = chz.field(default=None, doc="URL of a Tinker server for the judge")
    grader_llm_name: str = chz.field(default="Qwen/Qwen3.6-35B-A3B", doc="The judge's model")
    grader_renderer_name: str | None = chz.field(default=None, doc="The judge's chat format")
    grader_mode: JudgeMode = chz.field(
        default="text", doc="text: sample a text with a score; labels: probability of Yes"
    )
    judge: JudgeSettings | None = chz.field(default=None, doc="All settings of the judge")
    format_coef: float = chz.field(
        default=0.1, doc="Penalty for an answer without the stop sequence"
    )
    labelled_path: str | None = chz.field(
        default=None, doc="Labelled answers to measure the judge on before training"
    )
    min_kappa: float | None = chz.field(
        default=None,
        doc="Do not train if the judge's Cohen's kappa on labelled_path is below this value",
    )

    def judge_settings(self) -> JudgeSettings:
        """Returns ``judge``, or the settings that the other fields describe."""
        if self.judge is not None:
            return self.judge
        return JudgeSettings(
            model_name=self.grader_llm_name,
            renderer_name=self.grader_renderer_name,
            base_url=self.base_url,
            mode=self.grader_mode,
        )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a setting that cannot work."""
        if self.min_kappa is not None and self.labelled_path is None:
            raise ConfigurationError(
                f"min_kappa: got {self.min_kappa} without labelled_path, expected a file of "
                "labelled answers to measure it on"
            )
        self.judge_settings().check()

    async def __call__(self) -> tuple[RubricGradedDataset, RubricGradedDataset | None]:
        """Loads the data, and measures the judge if there are labelled answers."""
        self.check()
        points = await asyncio.to_thread(self.train_datapoint_list_builder)
        held_out = self.test_datapoint_list_builder
        test_points = None if held_out is None else await asyncio.to_thread(held_out)
        judge = LazyJudge(self.judge_settings())
        if self.labelled_path is not None:
            labelled = await asyncio.to_thread(load_labelled, self.labelled_path)
            agreement = await judge_agreement(judge, labelled)
            print_agreement(agreement, self.judge_settings())
            if self.min_kappa is not None and agreement.kappa < self.min_kappa:
                raise ConfigurationError(
                    f"min_kappa: got a judge with Cohen's kappa {agreement.kappa:.2f}, expected at "
                    f"least {self.min_kappa:g}; take another judge, or lower min_kappa"
                )
        tokenizer = get_tokenizer(self.model_name_for_tokenizer)
        build = partial(
            RubricGradedDataset,
            get_renderer(self.renderer_name, tokenizer),
            self.batch_size,
            grader_llm=judge,
            format_coef=self.format_coef,
        )
        train = build(group_size=self.train_group_size, datapoints=points)
        if test_points is None:
            return train, None
        return train, build(group_size=self.test_group_size, datapoints=test_points)


async def judge_agreement(judge: Judge, labelled: Sequence[LabelledAnswer]) -> Agreement:
    """Measures the judge on every criterion of every labelled answer."""

    async def scores_of(one: LabelledAnswer) -> list[float | None]:
        try:
            judged = await grade(judge, one.convo, one.rubric_items)
            # A judge that writes text may write any number.
            return [found.score if 0 <= found.score <= 1 else None for found in judged]
        except EvalGradingError as error:
            logger.warning("a labelled answer is left out: %s", error)
            return [None] * len(one.labels)

    found = await gather_or_cancel(scores_of(one) for one in labelled)
    labels = [label for one in labelled for label in one.labels]
    return measure_agreement([score for scores in found for score in scores], labels)


def print_agreement(agreement: Agreement, settings: JudgeSettings) -> None:
    """Prints the agreement of a judge with the labels."""
    where = settings.model_path or settings.model_name
    print_line(
        f"Judge: {where}{f' at {settings.url}' if settings.url else ''}, mode={settings.mode}"
    )
    for line in agreement.lines():
        print_line(f"  {line}")
