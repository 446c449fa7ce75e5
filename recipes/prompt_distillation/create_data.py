"""Prompt distillation, step 1: a teacher with a long prompt answers queries.

    python -m recipes.prompt_distillation.create_data output_file=/tmp/tinker-datasets/lang.jsonl
    python -m recipes.prompt_distillation.create_data teacher_model=Qwen/Qwen3-30B-A3B …
    python -m recipes.prompt_distillation.create_data teacher_prompt_file=my.txt \\
        input_file=my_queries.txt labels=positive,negative output_file=…

The default task is to name the language of a text by two letters (``tasks.py``), on
``recipes/example_data/languages.jsonl``. The demo model cannot follow the long prompt of
task=language, so with it the default is task=language_by_examples; any other teacher gets
task=language.

Rows are conversations without the prompt, which ``recipes.prompt_distillation.train`` and
``recipes.sl_basic dataset_path=…`` read. Answers that do not parse are dropped and counted; they
are in ``OUTPUT_FILE.run/dropped.jsonl``. A run that was stopped continues when it is started again;
queries may be added to the file meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import chz

from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.eval.statistics import describe_share
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.prompt_distillation.tasks import (
    LANGUAGE_CLASSIFICATION_PROMPT,
    TASKS,
    Query,
    Reason,
    Task,
    parse_labels,
    prompt_of_file,
    read_queries,
)
from tinker_cookbook.recipes.start import DEMO_MODEL, check_one_of, example_data
from tinker_cookbook.renderers import Renderer, get_text_content
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.run.jsonl import Row, append_row, encode_row, read_rows
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.paths import ensure_writable_dir, local_path, write_atomically
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.training.config import BackendSettings, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import ProgressDisplay, print_line

__all__ = ["LANGUAGE_CLASSIFICATION_PROMPT", "Config", "main"]

DEFAULT_OUTPUT_FILE = "/tmp/tinker-datasets/prompt_distillation_lang.jsonl"
_CONCURRENCY = 32  # queries that are sampled at the same time


@chz.chz
class Config(BackendSettings):
    """Settings of the teacher."""

    output_file: str = chz.field(
        default=DEFAULT_OUTPUT_FILE, doc="File to write the conversations to"
    )
    input_file: str = chz.field(
        default=str(example_data("languages.jsonl")),
        doc="Queries: text, one per line, or JSONL with query, label, group",
    )
    max_queries: int | None = number(
        None, "Number of queries; the first ones of the file are used", low=1
    )
    teacher_model: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder")
    teacher_path: str | None = weights_field(
        "sampler_weights", "The teacher's adapter; default: none"
    )
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    task: Literal["language", "language_by_examples"] | None = chz.field(
        default=None, doc="language or language_by_examples; default: depends on the teacher"
    )
    teacher_prompt_file: str | None = chz.field(
        default=None, doc="Your own prompt: text with {query} for the query"
    )
    answer_regex: str | None = chz.field(
        default=None, doc="Regex whose first group is the answer; default: the task's"
    )
    labels: str | None = chz.field(
        default=None, doc="Valid answers: a,b or Good=a,Bad=b; default: those of the task"
    )
    temperature: float = number(0.0, "Sampling temperature of the teacher; 0 is greedy")
    max_tokens: int | None = number(
        None, "Maximum tokens of an answer; default: 5 for language_by_examples, else 1000", low=1
    )
    seed: int = chz.field(default=0, doc="Seed of the samples")

    def task_name(self) -> str:
        """Returns the task: the demo model cannot follow a long prompt (0 of 48 texts right)."""
        default = "language_by_examples" if self.teacher_model == DEMO_MODEL else "language"
        return self.task or default

    def find_task(self) -> Task:
        """Returns the prompt and the rules of the settings."""
        check_one_of(task=self.task, teacher_prompt_file=self.teacher_prompt_file)
        path = self.teacher_prompt_file
        task = TASKS[self.task_name()] if path is None else prompt_of_file(path)
        return replace(
            task,
            answer_regex=self.answer_regex or task.answer_regex,
            labels=parse_labels(self.labels) if self.labels else task.labels,
            max_tokens=self.max_tokens or task.max_tokens,
        )

    def model(self) -> SamplingModelSettings:
        """Returns the teacher's model."""
        return SamplingModelSettings(
            model_path=self.teacher_path,
            model_name=None if self.teacher_path else self.teacher_model,
            renderer_name=self.renderer_name,
            **{name: getattr(self, name) for name in chz.chz_fields(BackendSettings)},
        )


def run_folder(output_file: str | Path) -> Path:
    """Returns the folder of ``config.json`` (what the answers depend on) and ``dropped.jsonl``."""
    path = Path(output_file).expanduser()
    return path.with_name(f"{path.name}.run")


class AnswerFile:
    """The file of conversations, and that of dropped answers, which a stopped run continues.

    Whole rows are appended, so a killed run leaves no half of one.

    Raises:
        ConfigurationError: The file was made with other settings.
    """

    def __init__(self, config: Config, task: Task, queries: Sequence[Query]) -> None:
        self.path, self.queries = local_path(config.output_file, "output_file"), queries
        self.dropped_path = run_folder(self.path) / "dropped.jsonl"
        # One file must not mix answers of different teachers, prompts or sampling settings.
        names = ("teacher_model", "teacher_path", "renderer_name", "temperature", "seed")
        settings: Row = {name: getattr(config, name) for name in names}
        settings = json.loads(encode_row({**settings, **asdict(task)}))
        file = run_folder(self.path) / "config.json"
        before = read_rows(file) if file.exists() or self.path.exists() else [settings]
        if before != [settings]:
            old = before[0] if before else {}
            changed = [f"{k} was {old.get(k)!s:.60}" for k in settings if old.get(k) != settings[k]]
            raise ConfigurationError(
                f"output_file: {self.path} was created with other settings: {'; '.join(changed)}. "
                "Give another output_file=…, repeat the settings, or delete it and "
                f"{file.parent.name} to start over"
            )
        write_atomically(file, encode_row(settings))
        self.kept, self.dropped = read_rows(self.path), read_rows(self.dropped_path)

    def missing(self) -> list[Query]:
        """Returns the queries without an answer."""
        answered = {row["id"] for row in self.kept + self.dropped}
        return [query for query in self.queries if query.id not in answered]

    def add(self, query: Query, text: str, target: str | Reason) -> None:
        """Writes an answer: the teacher's text, and the student's target or why it is dropped."""
        about = {"id": query.id, "label": query.label, "group": query.group, "answer": text}
        if isinstance(target, Reason):
            row = {**about, "query": query.text, "reason": target.value}
        else:
            turns = (("user", query.text), ("assistant", target))
            messages = [{"role": role, "content": content} for role, content in turns]
            row = {"messages": messages, **about}
        dropped = isinstance(target, Reason)
        append_row(self.dropped_path if dropped else self.path, row)
        (self.dropped if dropped else self.kept).append(row)

    def finish(self) -> None:
        """Puts the rows into the order of the queries: answers arrived in any order."""
        order = {query.id: i for i, query in enumerate(self.queries)}
        for path, rows in ((self.path, self.kept), (self.dropped_path, self.dropped)):
            rows.sort(key=lambda row: order.get(row["id"], len(order)))
            write_atomically(path, b"".join(map(encode_row, rows)))


async def answer_queries(
    policy: TinkerTokenCompleter, renderer: Renderer, task: Task, output: AnswerFile
) -> None:
    """Writes the missing answers into ``output``, each as soon as it is complete."""
    queries = output.missing()
    display = ProgressDisplay(len(queries), 0, "teacher")
    # All workers share one iterator, so a slow answer does not hold up the other queries.
    waiting, done = iter(queries), 0

    async def work() -> None:
        nonlocal done
        for query in waiting:
            # The seed follows from the query's text: a resumed run samples the same answers.
            prompt = renderer.build_generation_prompt(task.prompt(query.text))
            sample = await policy.derived(int(query.id, 16))(prompt, renderer.get_stop_sequences())
            message, ended = renderer.parse_response(sample.tokens)
            text = get_text_content(message)
            target = task.target(text, bool(ended))
            output.add(query, text, target)
            done += 1
            # The first few answers are shown, so that a wrong prompt is seen at once.
            if done <= 5:
                outcome = "dropped" if isinstance(target, Reason) else "learned"
                print_line(f"  {query.text!r:.70} -> {text!r:.70}  [{outcome}: {target}]")
            counts = f"kept {len(output.kept)}  dropped {len(output.dropped)}"
            display.update(done, f"{done}/{len(queries)}  {counts}")

    display.start()
    try:
        await gather_or_cancel(work() for _ in range(min(_CONCURRENCY, len(queries))))
    finally:
        display.stop()


def summary(output: AnswerFile) -> Iterator[str]:
    """Returns lines with the counts of answers and labels, and the accuracy of the teacher."""
    kept, dropped = output.kept, output.dropped
    reasons = ", ".join(f"{n} {why}" for why, n in Counter(r["reason"] for r in dropped).items())
    yield f"answers      {len(kept)} kept, {len(dropped)} dropped{reasons and f' ({reasons})'}"
    known = [row for row in kept if row["label"] is not None]
    if known:
        right = sum(row["messages"][-1]["content"] == row["label"] for row in known)
        # Both shares, because dropping the unclear answers makes the teacher look better.
        total = len(known) + sum(row["label"] is not None for row in dropped)
        yield f"right        {describe_share(right, len(known))} of those kept"
        yield f"             {describe_share(right, total)} of all, a dropped one counted as wrong"
    yield f"written to   {output.path}"


async def main(config: Config) -> None:
    """Samples a teacher's answers to queries and writes them to ``output_file``."""
    task, settings = config.find_task(), config.model()
    settings.check()
    labels = None if task.labels is None else set(task.labels.values())
    queries = read_queries(config.input_file, labels)[: config.max_queries]
    path = local_path(config.output_file, "output_file")
    ensure_writable_dir(path.parent, "output_file")
    with RunLock(run_folder(path)):
        output = AnswerFile(config, task, queries)
        if output.missing():
            if count := len(output.kept) + len(output.dropped):
                print_line(f"continuing after {count} answers")
            with await asyncio.to_thread(settings.connect) as connection:
                model = await open_sampling_model(connection, settings)
                policy = TinkerTokenCompleter(
                    model.client, task.max_tokens, config.temperature, seed=config.seed
                )
                await answer_queries(policy, model.renderer, task, output)
        output.finish()
    for line in summary(output):
        print_line(line)
    if not output.kept:
        raise DataValidationError(
            f"output_file: none of the {len(output.dropped)} answers counts, so there is no row to "
            f"train on; they are in {output.dropped_path}. Change labels, answer_regex, max_tokens "
            "or the prompt, and give another output_file"
        )


if __name__ == "__main__":
    run_entrypoint(main)
