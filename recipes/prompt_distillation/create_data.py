"""Prompt distillation, step 1: a teacher with a long prompt answers queries.

    python -m recipes.prompt_distillation.create_data output_file=/tmp/tinker-datasets/lang.jsonl
    python -m recipes.prompt_distillation.create_data teacher_model=Qwen/Qwen3-30B-A3B …
    python -m recipes.prompt_distillation.create_data teacher_prompt_file=my.txt \\
        input_file=my_queries.txt labels=positive,negative output_file=…

The default task is to name the language of a text by two letters (``prompts.py``), on
``recipes/example_data/languages.jsonl``. The demo model cannot follow the long prompt of
task=language, so with it the default is task=language_by_examples; any other teacher gets
task=language.

Rows are conversations without the prompt, which ``recipes.prompt_distillation.train`` and
``recipes.sl_basic dataset_path=…`` read. Answers that do not parse are dropped and counted. A run
that was stopped continues when it is started again; queries may be added to the file meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook import model_info
from tinker_cookbook.backends.connect import check_backend, connect_with
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.eval.statistics import describe_share
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.prompt_distillation.output import DistillationFile
from tinker_cookbook.recipes.prompt_distillation.prompts import (
    LANGUAGE_CLASSIFICATION_PROMPT,
    PLACEHOLDER,
    Task,
    find_task,
    misspelt_placeholder,
    read_teacher_prompt,
)
from tinker_cookbook.recipes.prompt_distillation.queries import (
    AnswerReader,
    Query,
    Reason,
    parse_labels,
    read_queries,
)
from tinker_cookbook.recipes.start import DEMO_MODEL, example_data
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.run.jsonl import Row
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import BackendSettings, check_model, check_settings, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import Pace, ProgressDisplay, get_console

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient

__all__ = ["LANGUAGE_CLASSIFICATION_PROMPT", "Config", "main"]

DEFAULT_OUTPUT_FILE = "/tmp/tinker-datasets/prompt_distillation_lang.jsonl"
QUERIES = example_data("languages.jsonl")


@chz.chz
class Config(BackendSettings):
    """Settings of the teacher. Options that are None are derived and printed."""

    output_file: str = chz.field(
        default=DEFAULT_OUTPUT_FILE, doc="File to write the conversations to"
    )
    input_file: str = chz.field(
        default=str(QUERIES), doc="Queries: text, one per line, or JSONL with query, label, group"
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

    temperature: float = chz.field(
        default=0.0, doc="Sampling temperature of the teacher; 0 is greedy"
    )
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


def resolve(config: Config) -> Config:
    """Checks the settings and fills in defaults of the teacher; loads nothing."""
    if not 0 <= config.temperature < float("inf"):
        raise ConfigurationError(
            f"temperature: got {config.temperature}, expected a finite number >= 0"
        )
    if not 0 < config.top_p <= 1:
        raise ConfigurationError(f"top_p: got {config.top_p}, expected more than 0, at most 1")
    if config.samples_per_query > 1 and config.temperature == 0:
        raise ConfigurationError(
            f"samples_per_query: got {config.samples_per_query} with temperature=0, where answers "
            "are all alike; expected 1, or a temperature above 0"
        )
    if config.task is not None and config.teacher_prompt_file is not None:
        raise ConfigurationError(
            f"task={config.task} and teacher_prompt_file={config.teacher_prompt_file} both name "
            "the prompt; leave one out"
        )
    check_model(config)
    task, max_tokens = config.task, config.max_tokens
    if task is None and config.teacher_prompt_file is None:
        # The demo model cannot follow a long prompt: it got 0 of 48 texts right with one.
        task = "language_by_examples" if config.teacher_model == DEMO_MODEL else "language"
    if max_tokens is None:
        # With examples the answer is the first word; more tokens would be discarded.
        max_tokens = 5 if task == "language_by_examples" else 1000
    name, _ = model_info.resolve_renderer_name(config.teacher_model, config.renderer_name)
    # Filled in, so that the printed settings and config.json have the values that are used.
    config = chz.replace(config, task=task, max_tokens=max_tokens, renderer_name=name)
    check_settings(config)
    return config


def task_of(config: Config) -> Task:
    """Returns the prompt and the rules for its answers; ``config`` is resolved."""
    if config.task is not None:
        task = find_task(config.task)
    else:
        task = Task(read_teacher_prompt(str(config.teacher_prompt_file)), None, None)
    return Task(
        task.prompt,
        task.answer_regex if config.answer_regex is None else config.answer_regex,
        task.labels if config.labels is None else parse_labels(config.labels),
    )


def settings_of(config: Config, task: Task) -> dict[str, Any]:
    """Returns the settings that the answers depend on."""
    # A stopped run may continue only with the same values: one file must not mix answers of
    # different teachers, prompts or sampling settings.
    names = (
        "teacher_model",
        "teacher_path",
        "renderer_name",
        "temperature",
        "top_p",
        "max_tokens",
        "samples_per_query",
        "seed",
    )
    return {
        **{name: getattr(config, name) for name in names},
        "answer_regex": task.answer_regex,
        "labels": None if task.labels is None else dict(task.labels),
        "prompt": [dict(message) for message in task.prompt.messages],
    }


def check_length(config: Config, task: Task, queries: list[Query]) -> None:
    """Raises an error, before the teacher is loaded, if the prompt leaves no room for an answer.

    Only for the local engine: another backend knows the context of its models itself.
    """
    kind, _, _ = check_backend(config.backend, config.base_url, config.device, config.dtype)
    context = model_info.resolve_max_length(config.teacher_model, None)
    if kind != "local" or context is None or not queries:
        return
    # The number of characters selects one query, so that only one prompt is tokenized.
    longest = max(queries, key=lambda query: len(query.text))
    renderer = get_renderer(str(config.renderer_name), get_tokenizer(config.teacher_model))
    prompt = renderer.build_generation_prompt(task.prompt.messages_for(longest.text)).length
    # Prompt and answer share the context.
    if prompt + int(config.max_tokens or 1) > context:
        raise ConfigurationError(
            f"max_tokens: got {config.max_tokens}, but the prompt has {prompt} tokens with the "
            f"longest query, and the context of {config.teacher_model} is {context}; expected at "
            f"most {context} together: set max_tokens to less, or take a shorter prompt or another "
            "teacher_model"
        )


async def answer_queries(
    config: Config,
    client: SamplingClient,
    task: Task,
    output: DistillationFile,
    queries: Sequence[Query],
) -> None:
    """Writes the answers to ``queries`` into ``output``, each as soon as it is complete.

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
    reader = AnswerReader(task.answer_regex, task.labels)
    display = ProgressDisplay(len(queries), 0, "teacher")
    pace = Pace(display.clock(), 0)
    # All workers share one iterator, so a slow answer does not hold up the other queries.
    waiting, done = iter(queries), 0

    async def work() -> None:
        nonlocal done
        for query in waiting:
            # The seed follows from the query's text: a resumed run samples the same answers.
            samples = await complete.derived(int(query.id, 16)).sample_many(
                renderer.build_generation_prompt(task.prompt.messages_for(query.text)),
                renderer.get_stop_sequences(),
                config.samples_per_query,
            )
            answers: list[tuple[str, str | Reason]] = []
            for sample in samples:
                message, ended = renderer.parse_response(sample.tokens)
                text = get_text_content(message)
                answers.append((text, reader.read(text, bool(ended))))
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


def _shown(query: Query, answer_text: str, target: str | Reason) -> str:
    lines = [" ".join(text.split()) for text in (query.text, answer_text)]
    text, answer = (line if len(line) <= 70 else f"{line[:70]}…" for line in lines)
    outcome = f"dropped, {target.value}" if isinstance(target, Reason) else f"learned: {target}"
    known = "" if query.label is None else f" (right: {query.label})"
    return f"  {text} -> {answer}  [{outcome}{known}]"


def print_summary(output: DistillationFile, labels: Mapping[str, str] | None = None) -> None:
    """Prints counts of answers and labels, and the accuracy of the teacher.

    ``labels`` are the possible answers; a label without any answer is reported.
    """
    for line in _summary(output, labels):
        get_console().print(line, markup=False, soft_wrap=True)


def _summary(output: DistillationFile, labels: Mapping[str, str] | None) -> Iterator[str]:
    kept, dropped = output.kept, output.dropped
    reasons = ", ".join(f"{n} {why}" for why, n in Counter(r["reason"] for r in dropped).items())
    suffix = f" ({reasons})" if reasons else ""
    yield f"answers      {len(kept)} kept, {len(dropped)} dropped{suffix}"
    counts = Counter(target_of(row) for row in kept)
    # Free text has too many different answers for a line of counts.
    if 0 < len(counts) <= 30:
        yield "labels       " + "  ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    known = [row for row in kept if "label" in row]
    if known:
        right = sum(target_of(row) == row["label"] for row in known)
        # Both shares, because dropping the unclear answers makes the teacher look better.
        total = len(known) + sum("label" in row for row in dropped)
        yield f"right        {describe_share(right, len(known))} of those kept"
        yield f"             {describe_share(right, total)} of all, a dropped one counted as wrong"
    # Without any kept answer every label is missing; check_kept reports that.
    if not kept:
        return
    unseen = sorted(set((labels or {}).values()) - counts.keys())
    if unseen:
        yield (
            f"warning: labels: no answer kept is {', '.join(unseen)}, so a student cannot learn "
            "it; the prompt may not request it, or all such answers were dropped"
        )
    yield f"written to   {output.path}"


def check_kept(output: DistillationFile) -> None:
    """Raises ``DataValidationError`` if no answer was kept: there is nothing to train on."""
    if output.kept:
        return
    reasons = Counter(row["reason"] for row in output.dropped)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    raise DataValidationError(
        f"output_file: none of the {len(output.dropped)} answers counts ({counts}), so "
        f"{output.path} has no row to train on; the answers are in "
        f"{output.folder / 'dropped.jsonl'}. Change labels, answer_regex, max_tokens or the "
        "prompt, and give another output_file"
    )


def target_of(row: Row) -> str:
    """Returns the student's target in a row that was kept."""
    return row["messages"][-1]["content"]


async def main(config: Config) -> None:
    """Samples a teacher's answers to queries and writes them to ``output_file``."""
    config = resolve(config)
    task = task_of(config)
    AnswerReader(task.answer_regex, task.labels)  # raises for a wrong pattern before any work
    labels = None if task.labels is None else set(task.labels.values())
    queries = read_queries(config.input_file, labels)[: config.max_queries]
    if (mistake := misspelt_placeholder(task.prompt)) is not None:
        _print(
            f"warning: the prompt has {mistake}, which stays as it is; did you mean {PLACEHOLDER}, "
            "which is replaced by the query? Without it the query is appended as a user message"
        )
    check_length(config, task, queries)
    with DistillationFile(
        config.output_file, settings_of(config, task), queries, config.samples_per_query
    ) as output:
        missing = output.missing()
        if missing:
            await _answer(config, task, output, missing)
        output.finish()
        print_summary(output, task.labels)
        # After the summary, which lists the reasons for the dropped answers.
        check_kept(output)


async def _answer(
    config: Config, task: Task, output: DistillationFile, missing: list[Query]
) -> None:
    """Connects to the backend and samples answers to the missing queries."""
    _print("settings:")
    for name in chz.chz_fields(Config):
        _print(f"  {name} = {getattr(config, name)}")
    if output.kept or output.dropped:
        _print(f"continuing: {len(output.kept)} answers kept, {len(output.dropped)} dropped so far")
    with connect_with(config) as connection:
        _print(connection.describe())
        if config.teacher_path is not None:
            # The checkpoint knows its base model.
            opened = connection.service.create_sampling_client(model_path=config.teacher_path)
        else:
            opened = connection.service.create_sampling_client(base_model=config.teacher_model)
        await answer_queries(config, await opened, task, output, missing)


def _print(line: str) -> None:
    get_console().print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_entrypoint(main)
