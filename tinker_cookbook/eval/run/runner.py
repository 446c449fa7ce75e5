"""Runs one benchmark: samples, grades, stores every answer, and resumes an interrupted run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tinker_cookbook.eval.run.answer_record import AnswerRecord
from tinker_cookbook.eval.run.answers import AnswerFile, summarize, update_summary
from tinker_cookbook.eval.run.env_run import EnvRun
from tinker_cookbook.eval.run.example_run import BenchmarkRun, ExampleRun, Progress
from tinker_cookbook.eval.run.examples import ExampleBenchmark
from tinker_cookbook.eval.run.logprob_run import LogprobRun
from tinker_cookbook.eval.run.sources import AnswerSource, RendererSource, identify
from tinker_cookbook.eval.run.types import BenchmarkBuilder, BenchmarkConfig, BenchmarkResult
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.leaves import load_leaf
from tinker_cookbook.run.lock import RunLock


def check_requirements(builder: BenchmarkBuilder, config: BenchmarkConfig) -> None:
    """Raises ConfigurationError for a benchmark that cannot run with these settings."""
    if builder.requires_sandbox and config.sandbox_factory is None:
        sandbox = load_leaf("sandbox", builder.name)
        try:
            sandbox.available_tier()
        except sandbox.SandboxUnavailableError as error:
            raise sandbox.SandboxUnavailableError(
                f"{builder.name}: runs programs that a model writes, and this machine cannot "
                f"isolate them: {error}"
            ) from error
    if builder.requires_judge and None in (config.judge_sampling_client, config.judge_renderer):
        raise ConfigurationError(
            f"{builder.name}: a judge model grades the answers; set judge_sampling_client "
            "and judge_renderer of BenchmarkConfig (judge_path= or judge_name= on the command "
            "line)"
        )
    if config.scoring == "logprob" and not isinstance(builder, ExampleBenchmark):
        raise ConfigurationError(f"{builder.name}: scoring=logprob needs a list of choices")


async def evaluate(
    builder: BenchmarkBuilder,
    source: AnswerSource,
    config: BenchmarkConfig,
    progress: Progress | None = None,
) -> BenchmarkResult:
    """Runs one benchmark on any source of answers; see ``benchmarks.run_benchmark``."""
    check_requirements(builder, config)
    if config.save_dir is None:
        return await _run(builder, source, config, progress, None)
    folder = Path(config.save_dir) / builder.name
    # Two processes would sample the same answers twice.
    with RunLock(folder):
        result = await _run(builder, source, config, progress, folder)
    update_summary(config.save_dir, {builder.name: result})
    return result


async def _run(
    builder: BenchmarkBuilder,
    source: AnswerSource,
    config: BenchmarkConfig,
    progress: Progress | None,
    folder: Path | None,
) -> BenchmarkResult:
    started = time.monotonic()
    kind: type[BenchmarkRun] = LogprobRun if config.scoring == "logprob" else ExampleRun
    if not isinstance(builder, ExampleBenchmark):
        kind = EnvRun
    run = kind(builder, source, config, progress)
    description = {
        "benchmark": builder.name,
        "model": source.model_id,
        "scoring": config.scoring,
        **(source.description() if config.scoring == "generation" else {}),
        **await run.prepare(),
    }
    if builder.requires_judge and config.judge_sampling_client is not None:
        # Another judge gives other ratings, so it is part of the key.
        known = config.save_dir is None or config.judge_id is not None
        judge = config.judge_id if known else await identify(config.judge_sampling_client)
        description |= {"judge": judge, "judge_renderer": type(config.judge_renderer).__name__}
    run.file = file = await asyncio.to_thread(AnswerFile, folder, description)
    run.record = AnswerRecord(folder, config.record)
    try:
        rows = await run.run()
    finally:  # also after Ctrl-C
        run.record.write(builder.name, file.key, file.rows.values())
        if isinstance(source, RendererSource):
            run.record.write_vocabulary(source.renderer.tokenizer)
    result = summarize(builder.name, rows, builder.aggregate, time.monotonic() - started)
    file.write_result(result)
    return result
