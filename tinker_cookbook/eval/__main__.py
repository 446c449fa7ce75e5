"""Evaluates a checkpoint, a base model or an OpenAI-compatible server on benchmarks.

    python -m tinker_cookbook.eval model_path=LOG_PATH tasks=gsm8k,math500
    python -m tinker_cookbook.eval model_name=Qwen/Qwen3-0.6B tasks=mmlu scoring=logprob limit=500
    python -m tinker_cookbook.eval openai_url=http://localhost:8000/v1 model_name=NAME tasks=gsm8k
    python -m tinker_cookbook.eval model_name=Qwen/Qwen3-0.6B tasks=questions.jsonl match=exact

Every answer is stored immediately: after Ctrl-C the same command continues. Answers are reused
only for the same weights, prompt, chat format, sampling settings and grader.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook.backends.connect import Connection
from tinker_cookbook.eval.benchmarks import (
    BenchmarkBuilder,
    BenchmarkConfig,
    BenchmarkResult,
    ExampleBenchmark,
    find_benchmark,
    load_trajectories,
)
from tinker_cookbook.eval.benchmarks.questions import OwnQuestions, is_question_file
from tinker_cookbook.eval.benchmarks.registry import task_names
from tinker_cookbook.eval.report import EvalProgress, curve_table, result_table
from tinker_cookbook.eval.run.answers import (
    EVAL_ROOT,
    SETTINGS,
    default_folder,
    record_run,
    record_scores,
)
from tinker_cookbook.eval.run.chat_api import ChatApiSource
from tinker_cookbook.eval.run.runner import check_requirements, evaluate
from tinker_cookbook.eval.run.sources import AnswerSource, RendererSource
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.record.schema import RecordLevel
from tinker_cookbook.run.config import write_config
from tinker_cookbook.run.paths import ensure_writable_dir
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.sampling_model import (
    SamplingModel,
    SamplingModelSettings,
    open_sampling_model,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.command_line.programs import program_command
from tinker_cookbook.utils.heartbeat import reporting_activity
from tinker_cookbook.utils.terminal import get_console

_DEFAULT_MAX_TOKENS = BenchmarkConfig.max_tokens


@chz.chz
class Config(SamplingModelSettings):
    """Settings of the evaluation."""

    tasks: str = chz.field(
        doc="Comma-separated tasks: a file of questions (questions.jsonl), module:Class of a "
        f"benchmark, or {task_names()}"
    )
    match: str = chz.field(
        default="exact",
        doc="How answers to a file of questions are compared: exact, regex, math, letter, or "
        "judge:TEXT, where TEXT is a yes/no question to the judge model",
    )
    limit: int | None = chz.field(default=None, doc="First problems of each task; default: all")
    num_samples: int = chz.field(
        default=1, doc="Answers to each problem, for pass@k, maj@k and solve rates"
    )
    max_tokens: int | None = chz.field(
        default=None,
        doc=f"Tokens of an answer; default: {_DEFAULT_MAX_TOKENS}, or the model's context if it is "
        "shorter",
    )
    temperature: float = chz.field(default=0.6, doc="Sampling temperature; 0 is greedy")
    top_p: float = chz.field(
        default=1.0, doc="Nucleus sampling: total probability of the candidate tokens"
    )
    top_k: int = chz.field(default=-1, doc="Number of candidate tokens; -1: all")
    seed: int | None = chz.field(default=None, doc="Seed that makes sampling reproducible")
    system_prompt: str | None = chz.field(
        default=None, doc="System prompt; default: the task's recommended one, if any; '' for none"
    )
    scoring: Literal["generation", "logprob"] = chz.field(
        default="generation",
        doc="logprob compares the choices of multiple-choice tasks by their log-probabilities",
    )
    data_path: str | None = chz.field(
        default=None, doc="Local folder or file with the data; default: from the Hub"
    )
    out: str | None = chz.field(
        default=None, doc=f"Output folder for results and answers; default: {EVAL_ROOT}/runs/MODEL"
    )
    concurrency: int = chz.field(default=64, doc="Maximum concurrent requests")
    timeout_seconds: float = chz.field(default=3600.0, doc="Time limit of one problem in seconds")
    record: RecordLevel = chz.field(
        default="full",
        doc="Record of the sampled tokens in the output folder: full, summary (no tokens) or off",
    )
    openai_url: str | None = chz.field(
        default=None, doc="URL of an OpenAI-compatible server, such as http://localhost:8000/v1"
    )
    api_key: str | None = chz.field(
        default=None, doc="API key for openai_url; default: OPENAI_API_KEY of the environment"
    )
    judge_path: str | None = weights_field("sampler_weights", "Judge model, for tasks with a judge")
    judge_name: str | None = chz.field(
        default=None, doc="Base model as judge, instead of judge_path"
    )
    judge_renderer_name: str | None = chz.field(
        default=None, doc="Chat format of the judge; default: the recorded one, or the model's"
    )

    def check(self) -> None:
        """Raises ConfigurationError for an invalid setting; opens no connection."""
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError(f"limit: got {self.limit}, expected at least 1")
        builders = self.builders
        if not builders:
            raise ConfigurationError(f"tasks: got none, expected some of {task_names()}")
        names = [builder.name for builder in builders]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(
                f"tasks: got two tasks with the name {repeated!r}, which is the folder of their "
                "results; expected different names"
            )
        has_judge = self.judge_path is not None or self.judge_name is not None
        for builder in builders:
            if isinstance(builder, OwnQuestions):
                builder.examples(self.benchmark_config())  # reads the file before the model
            # The judge is opened later; only its settings are checked here.
            if not (builder.requires_judge and has_judge):
                check_requirements(builder, self.benchmark_config())
            if self.openai_url is not None and not isinstance(builder, ExampleBenchmark):
                raise ConfigurationError(
                    f"openai_url: {builder.name} has several turns, which a chat API cannot run; "
                    "expected model_path= or model_name= without openai_url"
                )
        if self.openai_url is None:
            super().check()
        elif self.model_path is not None or self.model_name is None:
            raise ConfigurationError(
                "openai_url: expected model_name= (the server's name) without model_path="
            )

    @property
    def builders(self) -> list[BenchmarkBuilder]:
        """Returns the benchmarks without repetitions."""
        names = dict.fromkeys(filter(None, map(str.strip, self.tasks.split(","))))
        return [
            OwnQuestions(name, self.match) if is_question_file(name) else find_benchmark(name)
            for name in names
        ]

    @property
    def judge(self) -> SamplingModelSettings | None:
        """Settings of the judge model, which uses the same backend."""
        if self.judge_path is None and self.judge_name is None:
            return None
        same = {
            name: getattr(self, name)
            for name in ("backend", "base_url", "device", "dtype", "base_dtype")
        }
        return SamplingModelSettings(
            model_path=self.judge_path,
            model_name=self.judge_name,
            renderer_name=self.judge_renderer_name,
            **same,
        )

    def benchmark_config(self, **more: Any) -> BenchmarkConfig:
        """Returns the settings of the benchmarks."""
        same = (
            "num_samples temperature top_p top_k seed system_prompt scoring data_path concurrency "
            "timeout_seconds record"
        )
        given = {name: getattr(self, name) for name in same.split()}
        if self.max_tokens is not None:
            given["max_tokens"] = self.max_tokens
        return BenchmarkConfig(max_examples=self.limit, **given, **more)

    @property
    def folder(self) -> Path:
        """Output folder."""
        if self.out is not None:
            return Path(self.out).expanduser()
        return default_folder(self.model_path or self.model_name or "")


async def main(config: Config) -> None:
    """Evaluates the model, and prints a table and the next commands."""
    config.check()
    folder = ensure_writable_dir(config.folder, "out")
    write_config(folder / SETTINGS, chz.replace(config, api_key=None))
    try:
        async with AsyncExitStack() as stack:
            now = stack.enter_context(reporting_activity())
            with now.phase("loading the model"):
                source, settings, name = await _open(config, folder, stack)
            with now.phase("evaluating"):
                results = await _run_all(config, source, settings, folder, name)
    except asyncio.CancelledError:
        # Ctrl-C cancels the main task.
        print(f"\nstopped; all finished answers are in {folder}: the same command continues")
        raise
    _report(folder, results)


async def _open(
    config: Config, folder: Path, stack: AsyncExitStack
) -> tuple[AnswerSource, BenchmarkConfig, str]:
    """Opens the model, and the judge if there is one."""
    console = get_console()
    if config.openai_url is not None:
        judge = {} if config.judge is None else await _open_judge(config.connect(), config.judge)
        settings = config.benchmark_config(save_dir=str(folder), **judge)
        key = config.api_key or os.environ.get("OPENAI_API_KEY")
        assert config.model_name is not None
        source = ChatApiSource(config.openai_url, config.model_name, key, settings)
        await stack.enter_async_context(source)
        console.print(f"model: {config.model_name} at {config.openai_url}", markup=False)
        return source, settings, config.model_name
    connection = config.connect()
    model = await open_sampling_model(connection, config)
    console.print(
        f"model: {model.name}\nrenderer: {model.renderer_name} ({model.renderer_reason})",
        markup=False,
        soft_wrap=True,
    )
    context = resolve_max_length(model.model_name, None)
    max_tokens = config.max_tokens or min(_DEFAULT_MAX_TOKENS, context or _DEFAULT_MAX_TOKENS)
    judge = {} if config.judge is None else await _open_judge(connection, config.judge)
    config = chz.replace(config, max_tokens=max_tokens)
    settings = config.benchmark_config(
        save_dir=str(folder),
        context_window=context,
        model_id=await _identity(connection, model),
        **judge,
    )
    return await RendererSource.open(model.client, model.renderer, settings), settings, model.name


async def _open_judge(connection: Connection, judge: SamplingModelSettings) -> dict[str, Any]:
    """Opens the judge model; returns its fields of ``BenchmarkConfig``."""
    judge.check()
    opened = await open_sampling_model(connection, judge)
    get_console().print(f"judge: {opened.name}", markup=False)
    return {
        "judge_sampling_client": opened.client,
        "judge_renderer": opened.renderer,
        "judge_id": await _identity(connection, opened),
    }


async def _identity(connection: Connection, model: SamplingModel) -> str | None:
    """Returns the checkpoint's path and time, or None if the client identifies its weights
    itself."""
    if hasattr(model.client, "weights_digest"):
        return None
    if model.model_path is None:
        return model.model_name
    # Include the time: a checkpoint may be saved again under the same path.
    run = model.model_path.removeprefix("tinker://").partition("/")[0]
    listed = await connection.service.create_rest_client().list_checkpoints(run)
    times = [str(c.time) for c in listed.checkpoints if c.tinker_path == model.model_path]
    return " ".join([model.model_name, model.model_path, *times[:1]])


async def _run_all(
    config: Config, source: AnswerSource, settings: BenchmarkConfig, folder: Path, name: str
) -> dict[str, BenchmarkResult]:
    """Runs the tasks one by one, so that an interrupted run has some complete tasks."""
    recorded = {
        key: value
        for key, value in chz.asdict(config).items()
        if value is not None and key != "api_key"
    }
    names = [builder.name for builder in config.builders]
    if config.out is None:
        record_run(folder, name, names, config.model_path, config=recorded)
    results: dict[str, BenchmarkResult] = {}
    with EvalProgress() as progress:
        for builder in config.builders:
            results[builder.name] = await evaluate(builder, source, settings, progress)
    if config.out is None:
        record_scores(folder)
    return results


def _report(folder: Path, results: dict[str, BenchmarkResult]) -> None:
    """Prints the table, the solve rates and the next commands."""
    say = partial(get_console().print, markup=False, soft_wrap=True)
    say(result_table(results))
    if (curves := curve_table(results)) is not None:
        say(curves)
    for name, result in results.items():
        if result.pass_at_k:
            never, always = (result.metrics[f"{kind}_solved"] for kind in ("never", "always"))
            say(
                f"{name}: {never:.0f} problems never get the full reward, {always:.0f} always; "
                f"only the {result.metrics['mixed_share']:.0%} whose answers get different rewards "
                "have a gradient in group-based RL"
            )
        if "acc_norm" in result.metrics:
            say(f"{name}: acc_norm {result.metrics['acc_norm']:.1%}")
        if result.num_errors:
            errors = [row.error for row in load_trajectories(str(folder), name) if row.error]
            say(
                f"{name}: {result.num_errors} answers failed and do not count in the score; the "
                f"same command retries them. The first error: {errors[0] if errors else ''}"
            )
        if result.num_truncated:
            cut_off = f"{result.num_truncated} answers were cut off"
            say(f"{name}: {cut_off} at max_tokens or the context")
    show = (str(folder), f"task={next(iter(results))}", "incorrect_only=True")
    other = (f"a={folder}", "b=OTHER")
    again = (f"config={folder / SETTINGS}", "out=FOLDER")
    say(
        f"files: {folder}/TASK/trajectories.jsonl, result.json; summary.json\n"
        f"repeat: {program_command('tinker_cookbook.eval', *again)}\n"
        "show answers below the full reward: "
        f"{program_command('tinker_cookbook.eval.show', *show)}\n"
        f"compare with another model: {program_command('tinker_cookbook.eval.compare', *other)}"
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    run_entrypoint(main)
