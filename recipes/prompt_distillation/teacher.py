"""The teacher at work: queries asked side by side, answers written as they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.eval.proportion import describe_share
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.recipes.prompt_distillation.output import DistillationFile
from tinker_cookbook.recipes.prompt_distillation.prompts import TeacherPrompt
from tinker_cookbook.recipes.prompt_distillation.queries import AnswerReader, Query, Reason
from tinker_cookbook.renderers import Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.utils.run_folder.jsonl import Row
from tinker_cookbook.utils.terminal import Pace, ProgressDisplay, get_console

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient

_SHOWN_ANSWERS = 5
_SHOWN_CHARS = 70


@dataclass(frozen=True)
class Sampling:
    """How the teacher answers.

    Attributes:
        client: Of any backend.
        renderer_name: The teacher's chat format, which need not be the student's.
        max_tokens: Longest answer.
        temperature: Of the softmax; 0 is greedy.
        top_p: Draw among the most probable tokens that hold this much; 1 is all.
        samples: Answers to each query.
        concurrency: Queries that are sampled concurrently.
        seed: An answer depends on it and on the query's text, not on the order of the queries.
    """

    client: SamplingClient
    renderer_name: str
    max_tokens: int
    temperature: float
    top_p: float
    samples: int
    concurrency: int
    seed: int


async def ask_teacher(
    sampling: Sampling,
    prompt: TeacherPrompt,
    reader: AnswerReader,
    output: DistillationFile,
    queries: Sequence[Query],
) -> None:
    """Writes the answers to ``queries`` into ``output``, each as soon as it is there."""
    renderer = get_renderer(sampling.renderer_name, sampling.client.get_tokenizer())
    complete = TinkerTokenCompleter(
        sampling.client,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )
    view = _View(output, len(queries))
    waiting = iter(queries)

    async def work() -> None:
        for query in waiting:
            answers = await _answers(
                complete.derived(int(query.id, 16)), renderer, prompt.ask(query.text), sampling
            )
            said = [(text, reader.read(text, ended)) for text, ended in answers]
            output.add(query, said)
            view.answered(query, said)

    view.start()
    try:
        await gather_or_cancel(work() for _ in range(min(sampling.concurrency, len(queries))))
    finally:
        view.stop()


async def _answers(
    complete: TinkerTokenCompleter, renderer: Renderer, messages: list, sampling: Sampling
) -> list[tuple[str, bool]]:
    """Returns the text of each answer without thinking, and whether the model ended it itself."""
    samples = await complete.sample_many(
        renderer.build_generation_prompt(messages), renderer.get_stop_sequences(), sampling.samples
    )
    parsed = [renderer.parse_response(sample.tokens) for sample in samples]
    return [(get_text_content(message), bool(ended)) for message, ended in parsed]


class _View:
    """What a person sees: the first few answers, then how many there are and how many count."""

    def __init__(self, output: DistillationFile, total: int) -> None:
        self._output, self._total, self._done = output, total, 0
        self._display = ProgressDisplay(total, 0, "teacher")
        self._pace = Pace(self._display.clock(), 0)

    def start(self) -> None:
        self._display.start()

    def stop(self) -> None:
        self._display.stop()

    def answered(self, query: Query, answers: Sequence[tuple[str, str | Reason]]) -> None:
        self._done += 1
        if self._done <= _SHOWN_ANSWERS and answers:
            words, said = answers[0]
            outcome = f"dropped, {said.value}" if isinstance(said, Reason) else f"learned: {said}"
            known = "" if query.label is None else f" (right: {query.label})"
            self._display.console.print(
                f"  {_short(query.text)} -> {_short(words)}  [{outcome}{known}]",
                markup=False,
                soft_wrap=True,
            )
        self._pace.update(self._display.clock(), self._done)
        parts = [
            f"{self._done}/{self._total}",
            f"kept {len(self._output.kept)}",
            f"dropped {len(self._output.dropped)}",
            *self._pace.describe(self._total),
        ]
        self._display.update(self._done, "  ".join(parts))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}…"


def say_summary(output: DistillationFile, labels: Mapping[str, str] | None = None) -> None:
    """Prints what is in the file: counts, labels, and how often the teacher is right.

    ``labels`` are the answers that may occur; one that never does is pointed out.
    """
    lines = [*_summary(output.kept, output.dropped)]
    if output.kept:
        lines += [*_unseen(output.kept, labels), f"written to   {output.path}"]
    for line in lines:
        get_console().print(line, markup=False, soft_wrap=True)


def check_kept(output: DistillationFile) -> None:
    """Raises ``DataValidationError`` where no answer counts: there is nothing to train on."""
    if output.kept:
        return
    reasons = Counter(row["reason"] for row in output.dropped)
    said = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    raise DataValidationError(
        f"output_file: none of the {len(output.dropped)} answers counts ({said}), so {output.path} "
        f"has no row to train on; the answers are in {output.folder / 'dropped.jsonl'}. Change "
        "labels, answer_regex, max_tokens or the prompt, and give another output_file"
    )


def _unseen(kept: Sequence[Row], labels: Mapping[str, str] | None) -> Iterator[str]:
    unseen = sorted(set((labels or {}).values()) - {said_in(row) for row in kept})
    if unseen:
        yield (
            f"warning: labels: no answer kept says {', '.join(unseen)}, so a student cannot learn "
            "to say it; the prompt may not ask for it, or all such answers were dropped"
        )


def _summary(kept: Sequence[Row], dropped: Sequence[Row]) -> Iterator[str]:
    reasons = ", ".join(f"{n} {why}" for why, n in Counter(r["reason"] for r in dropped).items())
    yield f"answers      {len(kept)} kept, {len(dropped)} dropped" + (
        f" ({reasons})" if reasons else ""
    )
    counts = Counter(said_in(row) for row in kept)
    if 0 < len(counts) <= 30:
        yield "labels       " + "  ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    known = [row for row in kept if "label" in row]
    if known:
        right = sum(said_in(row) == row["label"] for row in known)
        asked = len(known) + sum("label" in row for row in dropped)
        yield f"right        {describe_share(right, len(known))} of those kept"
        yield f"             {describe_share(right, asked)} of all, a dropped one counted as wrong"


def said_in(row: Row) -> str:
    """Returns what the student is to say, of a row that was kept."""
    return row["messages"][-1]["content"]
