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

from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook import model_info
from tinker_cookbook.backends.connect import check_backend, connect
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.prompt_distillation.output import DistillationFile
from tinker_cookbook.recipes.prompt_distillation.prompts import (
    LANGUAGE_CLASSIFICATION_PROMPT,
    QUERY_MARK,
    Task,
    find_task,
    misspelt_mark,
    read_teacher_prompt,
)
from tinker_cookbook.recipes.prompt_distillation.queries import (
    AnswerReader,
    Query,
    parse_labels,
    read_queries,
)
from tinker_cookbook.recipes.prompt_distillation.teacher import (
    Sampling,
    ask_teacher,
    check_kept,
    say_summary,
)
from tinker_cookbook.recipes.start import DEMO_MODEL, example_data
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import check_model, check_settings
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient, ServiceClient

__all__ = ["LANGUAGE_CLASSIFICATION_PROMPT", "Config", "main"]

DEFAULT_OUTPUT_FILE = "/tmp/tinker-datasets/prompt_distillation_lang.jsonl"
QUERIES = example_data("languages.jsonl")


@chz.chz
class Config:
    """Settings of the teacher; what is None is derived and printed."""

    output_file: str = chz.field(default=DEFAULT_OUTPUT_FILE, doc="Where the conversations go")
    input_file: str = chz.field(
        default=str(QUERIES), doc="Queries: text, one a line, or JSONL with query, label, group"
    )
    max_queries: int | None = chz.field(default=None, doc="Ask only the first so many")

    teacher_model: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder")
    teacher_path: str | None = chz.field(
        default=None, doc="tinker:// path of the teacher's adapter, where it has one"
    )
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")

    task: str | None = chz.field(
        default=None, doc="language or language_by_examples; default: what the teacher can do"
    )
    teacher_prompt_file: str | None = chz.field(
        default=None,
        doc="A prompt of yours instead: text, {query} where the query goes, or .json messages",
    )
    answer_regex: str | None = chz.field(
        default=None, doc="Regex whose first group is the answer; default: the task's"
    )
    labels: str | None = chz.field(
        default=None, doc="Answers that count: a,b or Good=a,Bad=b; default: the task's"
    )

    temperature: float = chz.field(default=0.0, doc="Of the teacher's softmax; 0 is greedy")
    top_p: float = chz.field(default=1.0, doc="Draw among the tokens that hold this much")
    max_tokens: int | None = chz.field(
        default=None, doc="Longest answer; default: 5 for language_by_examples, else 1000"
    )
    samples_per_query: int = chz.field(default=1, doc="Answers to each query")
    concurrency: int = chz.field(default=32, doc="Queries that are sampled concurrently")
    seed: int = chz.field(default=0, doc="Seed of the samples")

    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    base_url: str | None = chz.field(default=None, doc="URL of a Tinker server")
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu (local engine)")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16 (local engine)")

    @property
    def model_name(self) -> str:
        """The teacher, under the name that checks of models know."""
        return self.teacher_model


def resolve(config: Config) -> Config:
    """Fills in what follows from the teacher and checks the settings; loads nothing."""
    _check(config)
    check_model(config)
    task = config.task
    if task is None and config.teacher_prompt_file is None:
        task = "language_by_examples" if config.teacher_model == DEMO_MODEL else "language"
    max_tokens = config.max_tokens
    if max_tokens is None:
        max_tokens = 5 if task == "language_by_examples" else 1000
    config = chz.replace(
        config,
        task=task,
        max_tokens=max_tokens,
        renderer_name=model_info.resolve_renderer_name(config.teacher_model, config.renderer_name)[
            0
        ],
    )
    check_settings(config)
    return config


def _check(config: Config) -> None:
    for name, low in (
        ("max_queries", 1),
        ("max_tokens", 1),
        ("samples_per_query", 1),
        ("concurrency", 1),
    ):
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigurationError(f"{name}: got {value}, expected at least {low}")
    if not 0 <= config.temperature < float("inf"):
        raise ConfigurationError(
            f"temperature: got {config.temperature}, expected a finite number >= 0"
        )
    if not 0 < config.top_p <= 1:
        raise ConfigurationError(f"top_p: got {config.top_p}, expected more than 0, at most 1")
    if config.samples_per_query > 1 and config.temperature == 0:
        raise ConfigurationError(
            f"samples_per_query: got {config.samples_per_query} with temperature=0, whose answers "
            "are all alike; expected 1, or a temperature above 0"
        )
    if config.task is not None and config.teacher_prompt_file is not None:
        raise ConfigurationError(
            f"task={config.task} and teacher_prompt_file={config.teacher_prompt_file} both name "
            "the prompt; leave one out"
        )


def task_of(config: Config) -> Task:
    """Returns the prompt and which answers count; ``config`` is resolved."""
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
    """Returns what the answers depend on."""
    names = ("teacher_model", "teacher_path", "renderer_name", "temperature", "top_p")
    return {
        **{name: getattr(config, name) for name in names},
        "max_tokens": config.max_tokens,
        "samples_per_query": config.samples_per_query,
        "seed": config.seed,
        "answer_regex": task.answer_regex,
        "labels": None if task.labels is None else dict(task.labels),
        "prompt": [dict(message) for message in task.prompt.messages],
    }


def check_length(config: Config, task: Task, queries: list[Query]) -> None:
    """Refuses a prompt that leaves no room for an answer, before the teacher is loaded.

    Only for the local engine: another backend knows the context of its models itself.
    """
    kind, _, _ = check_backend(config.backend, config.base_url, config.device, config.dtype)
    context = model_info.resolve_max_length(config.teacher_model, None)
    if kind != "local" or context is None or not queries:
        return
    longest = max(queries, key=lambda query: len(query.text))
    renderer = get_renderer(str(config.renderer_name), get_tokenizer(config.teacher_model))
    prompt = renderer.build_generation_prompt(task.prompt.ask(longest.text)).length
    if prompt + int(config.max_tokens or 1) > context:
        raise ConfigurationError(
            f"max_tokens: got {config.max_tokens}, but the prompt has {prompt} tokens with the "
            f"longest query, and the context of {config.teacher_model} is {context}; expected at "
            f"most {context} together: set max_tokens to less, or take a shorter prompt or another "
            "teacher_model"
        )


def queries_of(config: Config, task: Task) -> list[Query]:
    """Returns the queries; their labels are to be such as the student may say."""
    labels = None if task.labels is None else set(task.labels.values())
    return read_queries(config.input_file, labels)[: config.max_queries]


async def main(config: Config) -> None:
    """Has a teacher answer queries."""
    config = resolve(config)
    task = task_of(config)
    AnswerReader(task.answer_regex, task.labels)  # a wrong pattern is refused before any work
    queries = queries_of(config, task)
    if (mistake := misspelt_mark(task.prompt)) is not None:
        _say(
            f"warning: the prompt has {mistake}, which stays as it is; did you mean {QUERY_MARK}, "
            "where the query goes? It follows as a message of its own now"
        )
    check_length(config, task, queries)
    with DistillationFile(
        config.output_file, settings_of(config, task), queries, config.samples_per_query
    ) as output:
        missing = output.missing()
        if missing:
            await _ask(config, task, output, missing)
        output.finish()
        say_summary(output, task.labels)
        check_kept(output)


async def _ask(config: Config, task: Task, output: DistillationFile, missing: list[Query]) -> None:
    """Connects and has the teacher answer what is missing."""
    _say("settings:")
    for name in chz.chz_fields(Config):
        _say(f"  {name} = {getattr(config, name)}")
    if output.kept or output.dropped:
        _say(f"continuing: {len(output.kept)} answers kept, {len(output.dropped)} dropped so far")
    with connect(
        config.backend, base_url=config.base_url, device=config.device, dtype=config.dtype
    ) as connection:
        _say(connection.describe())
        sampling = Sampling(
            client=await _teacher(connection.service, config),
            renderer_name=str(config.renderer_name),
            max_tokens=int(config.max_tokens or 1),
            temperature=config.temperature,
            top_p=config.top_p,
            samples=config.samples_per_query,
            concurrency=config.concurrency,
            seed=config.seed,
        )
        reader = AnswerReader(task.answer_regex, task.labels)
        await ask_teacher(sampling, task.prompt, reader, output, missing)


async def _teacher(service: ServiceClient, config: Config) -> SamplingClient:
    if config.teacher_path is not None:
        return await service.create_sampling_client(model_path=config.teacher_path)
    return await service.create_sampling_client(base_model=config.teacher_model)


def _say(line: str) -> None:
    get_console().print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_entrypoint(main)
