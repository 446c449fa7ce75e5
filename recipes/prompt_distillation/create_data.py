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

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook import model_info
from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.backends.connect import connect_with
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.eval.statistics import describe_share
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.prompt_distillation.tasks import (
    LANGUAGE_CLASSIFICATION_PROMPT,
    Query,
    Reason,
    Task,
    find_task,
    parse_labels,
    read_queries,
)
from tinker_cookbook.recipes.start import DEMO_MODEL, example_data
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.run.jsonl import Row, append_row, encode_row, read_rows
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.paths import ensure_writable_dir, local_path, write_atomically
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.training.config import BackendSettings, check_model, check_settings, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import Pace, ProgressDisplay, print_line

__all__ = ["LANGUAGE_CLASSIFICATION_PROMPT", "Config", "main"]

DEFAULT_OUTPUT_FILE = "/tmp/tinker-datasets/prompt_distillation_lang.jsonl"


@chz.chz
class Config(BackendSettings):
    """Settings of the teacher. Options that are None are derived and printed."""

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

    task: str | None = chz.field(
        default=None, doc="language or language_by_examples; default: depends on the teacher"
    )
    teacher_prompt_file: str | None = chz.field(
        default=None,
        doc="Your own prompt: text with {query} for the query, or .json messages",
    )
    answer_regex: str | None = chz.field(
        default=None, doc="Regex whose first group is the answer; default: the task's"
    )
    labels: str | None = chz.field(
        default=None, doc="Valid answers: a,b or Good=a,Bad=b; default: those of the task"
    )

    temperature: float = number(0.0, "Sampling temperature of the teacher; 0 is greedy")
    top_p: float = chz.field(default=1.0, doc="Nucleus sampling: share of the probability")
    max_tokens: int | None = number(
        None, "Maximum tokens of an answer; default: 5 for language_by_examples, else 1000", low=1
    )
    samples_per_query: int = number(1, "Answers to each query", low=1)
    concurrency: int = number(32, "Queries that are sampled concurrently", low=1)
    seed: int = chz.field(default=0, doc="Seed of the samples")

    @property
    def model_name(self) -> str:
        """The teacher, under the name that ``check_model`` expects."""
        return self.teacher_model


def resolve(config: Config) -> tuple[Config, Task]:
    """Checks the settings and fills in defaults of the teacher; loads nothing."""
    if not 0 < config.top_p <= 1:
        raise ConfigurationError(f"top_p: got {config.top_p}, expected more than 0, at most 1")
    if config.samples_per_query > 1 and config.temperature == 0:
        raise ConfigurationError(
            f"samples_per_query: got {config.samples_per_query} with temperature=0, where answers "
            "are all alike; expected 1, or a temperature above 0"
        )
    name, prompt = config.task, config.teacher_prompt_file
    if name is not None and prompt is not None:
        raise ConfigurationError(
            f"task={name} and teacher_prompt_file={prompt} both name the prompt; leave one out"
        )
    check_model(config)
    if name is None and prompt is None:
        # The demo model cannot follow a long prompt: it got 0 of 48 texts right with one.
        name = "language_by_examples" if config.teacher_model == DEMO_MODEL else "language"
    task = find_task(name, prompt)
    regex = task.answer_regex if config.answer_regex is None else config.answer_regex
    try:
        re.compile(regex or "")
    except re.error as error:
        raise ConfigurationError(
            f"answer_regex: got {regex!r}, not a regular expression: {error}"
        ) from error
    labels = task.labels if config.labels is None else parse_labels(config.labels)
    # Filled in, so that the printed settings have the values that are used. With examples the
    # answer is the first word; more tokens would be discarded.
    config = chz.replace(
        config,
        task=name,
        max_tokens=config.max_tokens or (5 if name == "language_by_examples" else 1000),
        renderer_name=model_info.resolve_renderer_name(config.teacher_model, config.renderer_name)[
            0
        ],
    )
    check_settings(config)
    return config, Task(task.messages, regex, labels)


def run_folder(output_file: str | Path) -> Path:
    """Returns the folder of ``config.json`` (what the answers depend on) and ``dropped.jsonl``."""
    path = Path(output_file).expanduser()
    return path.with_name(f"{path.name}.run")


class AnswerFile:
    """The file of conversations, and that of dropped answers, which a stopped run continues.

    Whole rows are appended, so a killed run leaves no half of one.

    Raises:
        ConfigurationError: The file was not made by this recipe, or with other settings or queries.
    """

    def __init__(self, config: Config, task: Task, queries: Sequence[Query]) -> None:
        self.path = local_path(config.output_file, "output_file")
        self.dropped_path = run_folder(self.path) / "dropped.jsonl"
        self.queries, self._samples = queries, config.samples_per_query
        self._order = {query.id: i for i, query in enumerate(queries)}
        # One file must not mix answers of different teachers, prompts or sampling settings.
        names = ("teacher_model", "teacher_path", "renderer_name", "temperature", "top_p")
        names += ("max_tokens", "samples_per_query", "seed")
        settings: Row = {name: getattr(config, name) for name in names}
        settings |= {"answer_regex": task.answer_regex, "labels": task.labels}
        self._check_settings({**settings, "prompt": list(task.messages)})
        self.kept, self.dropped = read_rows(self.path), read_rows(self.dropped_path)
        unknown = [row for row in self.rows() if row.get("id") not in self._order]
        if unknown:
            raise ConfigurationError(
                f"input_file: {self.path} has {len(unknown)} answers to queries that are not "
                "among these; expected the same queries, to which others may be added. Give "
                "another output_file=…, or the input_file that it was created with"
            )

    def _check_settings(self, settings: Row) -> None:
        file = run_folder(self.path) / "config.json"
        if not file.exists():
            # Without its settings a file cannot be continued; a file of the user's must not change.
            if self.path.exists():
                raise ConfigurationError(
                    f"output_file: {self.path} exists and was not made by this recipe (there is no "
                    f"{file}); give another output_file=…, or move it away"
                )
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, encode_row(settings))
        (before,) = read_rows(file)
        # As JSON, like the settings before.
        now: Row = json.loads(encode_row(settings))
        if changed := [
            f"{key} was {before.get(key)!s:.60} and is {now.get(key)!s:.60}"
            for key in now
            if before.get(key) != now[key]
        ]:
            raise ConfigurationError(
                f"output_file: {self.path} was created with other settings: {'; '.join(changed)}. "
                f"Give another output_file=…, repeat the settings, or delete {self.path.name} and "
                f"{file.parent.name} to start over"
            )

    def rows(self) -> list[Row]:
        """Returns the rows of all answers."""
        return self.kept + self.dropped

    def missing(self) -> list[Query]:
        """Returns the queries that have fewer answers than ``samples_per_query``."""
        have = Counter(row["id"] for row in self.rows())
        return [query for query in self.queries if have[query.id] < self._samples]

    def add(self, query: Query, answers: Sequence[tuple[str, str | Reason]]) -> None:
        """Writes a query's answers: for each the teacher's text, and the student's target or the
        reason why it is dropped. Answers that a stopped run wrote already are skipped."""
        have = {row["sample"] for row in self.rows() if row["id"] == query.id}
        known = {"label": query.label, "group": query.group}
        known = {key: value for key, value in known.items() if value is not None}
        for sample, (text, target) in enumerate(answers):
            about: Row = {"id": query.id, "sample": sample, **known}
            if sample in have:
                continue
            if isinstance(target, Reason):
                row = {**about, "query": query.text, "answer": text, "reason": target.value}
                append_row(self.dropped_path, row)
                self.dropped.append(row)
            else:
                turns = [("user", query.text), ("assistant", target)]
                messages = [{"role": role, "content": content} for role, content in turns]
                row = {"messages": messages, **about, "answer": text}
                append_row(self.path, row)
                self.kept.append(row)

    def finish(self) -> None:
        """Puts the rows into the order of the queries: answers arrived in any order."""
        for path, rows in ((self.path, self.kept), (self.dropped_path, self.dropped)):
            rows.sort(key=lambda row: (self._order[row["id"]], row["sample"]))
            if rows:
                write_atomically(path, b"".join(map(encode_row, rows)))


async def answer_queries(
    config: Config, client: SamplingClient, task: Task, output: AnswerFile
) -> None:
    """Writes the missing answers into ``output``, each as soon as it is complete.

    An answer depends on the seed and on the query's text, not on the order of the queries.
    """
    renderer = get_renderer(str(config.renderer_name), client.get_tokenizer())
    complete = TinkerTokenCompleter(
        client,
        max_tokens=int(config.max_tokens or 1),
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    queries = output.missing()
    display = ProgressDisplay(len(queries), 0, "teacher")
    pace = Pace(display.clock(), 0)
    # All workers share one iterator, so a slow answer does not hold up the other queries.
    waiting, done = iter(queries), 0

    async def work() -> None:
        nonlocal done
        for query in waiting:
            # The seed follows from the query's text: a resumed run samples the same answers.
            samples = await complete.derived(int(query.id, 16)).sample_many(
                renderer.build_generation_prompt(task.prompt(query.text)),
                renderer.get_stop_sequences(),
                config.samples_per_query,
            )
            answers: list[tuple[str, str | Reason]] = []
            for sample in samples:
                message, ended = renderer.parse_response(sample.tokens)
                text = get_text_content(message)
                answers.append((text, task.target(text, bool(ended))))
            # Written at once, so that a killed run keeps every finished answer.
            output.add(query, answers)
            done += 1
            # The first few answers are shown, so that a wrong prompt is seen at once.
            if done <= 5 and answers:
                display.console.print(_shown(query, *answers[0]), markup=False, soft_wrap=True)
            pace.update(display.clock(), done)
            counts = f"kept {len(output.kept)}", f"dropped {len(output.dropped)}"
            parts = [f"{done}/{len(queries)}", *counts, *pace.describe(len(queries))]
            display.update(done, "  ".join(parts))

    display.start()
    try:
        await gather_or_cancel(work() for _ in range(min(config.concurrency, len(queries))))
    finally:
        display.stop()


def _shown(query: Query, answer: str, target: str | Reason) -> str:
    text, answer = (f"{' '.join(one.split()):.70}" for one in (query.text, answer))
    outcome = f"dropped, {target.value}" if isinstance(target, Reason) else f"learned: {target}"
    known = "" if query.label is None else f" (right: {query.label})"
    return f"  {text} -> {answer}  [{outcome}{known}]"


def summary(output: AnswerFile) -> Iterator[str]:
    """Returns lines with the counts of answers and labels, and the accuracy of the teacher."""
    kept, dropped = output.kept, output.dropped
    reasons = ", ".join(f"{n} {why}" for why, n in Counter(r["reason"] for r in dropped).items())
    suffix = f" ({reasons})" if reasons else ""
    yield f"answers      {len(kept)} kept, {len(dropped)} dropped{suffix}"
    counts = Counter(_target(row) for row in kept)
    # Free text has too many different answers for a line of counts.
    if 0 < len(counts) <= 30:
        yield "labels       " + "  ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    known = [row for row in kept if "label" in row]
    if known:
        right = sum(_target(row) == row["label"] for row in known)
        # Both shares, because dropping the unclear answers makes the teacher look better.
        total = len(known) + sum("label" in row for row in dropped)
        yield f"right        {describe_share(right, len(known))} of those kept"
        yield f"             {describe_share(right, total)} of all, a dropped one counted as wrong"
    yield f"written to   {output.path}"


def _target(row: Row) -> str:
    return row["messages"][-1]["content"]


async def main(config: Config) -> None:
    """Samples a teacher's answers to queries and writes them to ``output_file``."""
    config, task = resolve(config)
    labels = None if task.labels is None else set(task.labels.values())
    queries = read_queries(config.input_file, labels)[: config.max_queries]
    path = local_path(config.output_file, "output_file")
    ensure_writable_dir(path.parent, "output_file")
    with RunLock(run_folder(path)):
        output = AnswerFile(config, task, queries)
        if output.missing():
            await _sample(config, task, output)
        output.finish()
    for line in summary(output):
        print_line(line)
    # After the summary, which lists the reasons for the dropped answers.
    if not output.kept:
        raise DataValidationError(
            f"output_file: none of the {len(output.dropped)} answers counts, so {output.path} has "
            f"no row to train on; the answers are in {output.dropped_path}. Change labels, "
            "answer_regex, max_tokens or the prompt, and give another output_file"
        )


async def _sample(config: Config, task: Task, output: AnswerFile) -> None:
    for name in chz.chz_fields(Config):
        print_line(f"  {name} = {getattr(config, name)}")
    if output.rows():
        kept, dropped = len(output.kept), len(output.dropped)
        print_line(f"continuing: {kept} answers kept, {dropped} dropped so far")
    path: Any = config.teacher_path  # the checkpoint knows its base model
    with connect_with(config) as connection:
        print_line(connection.describe())
        client = await connection.service.create_sampling_client(
            model_path=path, base_model=None if path else config.teacher_model
        )
        await answer_queries(config, client, task, output)


if __name__ == "__main__":
    run_entrypoint(main)
