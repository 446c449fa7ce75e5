"""Inspect AI tasks as evaluators: in a training loop (``evaluator_builders``), or on any client.

InspectEvaluatorBuilder(tasks="my_task.py", renderer_name="llama3", model_name=…, limit=100)
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import chz

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.eval.inspect_bridge.data import local_data
from tinker_cookbook.exceptions import ConfigurationError, EvalError
from tinker_cookbook.run.current import current_run_folder
from tinker_cookbook.run.paths import ensure_writable_dir
from tinker_cookbook.utils.imports import missing_extra

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog
    from inspect_ai.model import Model

Tasks: TypeAlias = Any
"""Tasks for Inspect: a file, ``file@task``, the name of a registered task, a ``Task``,
or a list of these. A string may have several tasks, separated by commas."""

DEFAULT_LOG_DIR = "~/inspect-logs"
"""Folder of the logs outside a run."""


@chz.chz
class InspectEvaluatorBuilder:
    """Settings of an evaluation with tasks of Inspect; calling it returns the evaluator."""

    tasks: Tasks = chz.field(
        doc="Tasks of Inspect, separated by commas: file.py, file.py@task or a registered name"
    )
    renderer_name: str | None = chz.field(
        default=None, doc="Chat format; default: the run's, else the model's"
    )
    model_name: str | None = chz.field(
        default=None, doc="Base model, Hub name or local folder; default: from the checkpoint"
    )
    seed: int | None = chz.field(default=None, doc="Seed of the samples; default: none")
    verbose: bool = chz.field(default=False, doc="Print each prompt and response")
    include_reasoning: bool = chz.field(default=False, doc="Keep thinking in the logs")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature; 0 is greedy")
    max_tokens: int = chz.field(default=1000, doc="Maximum tokens of a response")
    top_p: float = chz.field(default=1.0, doc="Nucleus sampling; 1: off")
    top_k: int = chz.field(default=-1, doc="Number of candidate tokens; -1 is off")
    num_choices: int = chz.field(default=1, doc="Responses per request")
    limit: int | None = chz.field(default=None, doc="Samples per task; default: all")
    debug_errors: bool = chz.field(
        default=True, doc="Stop at the first error; False: continue and count samples with errors"
    )
    log_dir: str | None = chz.field(
        default=None,
        doc=f"Folder of the logs; default: inspect-logs in the run's folder, or {DEFAULT_LOG_DIR}",
    )
    max_connections: int = chz.field(default=512, doc="Concurrent requests")
    log_level: str = chz.field(default="INFO", doc="Minimum level of messages in the logs")
    metadata: dict[str, str] | None = chz.field(default=None, doc="Metadata to write into the logs")
    epochs: int | None = chz.field(
        default=None, doc="Samples per problem; default: the task's own number"
    )
    data_path: str | None = chz.field(
        default=None, doc="Local folder with copies of Hub datasets of tasks; default: the Hub"
    )
    task_args: str | None = chz.field(
        default=None, doc='Arguments of the tasks as JSON: {"split": "test"}'
    )

    def check(self) -> None:
        """Raises ConfigurationError for an invalid setting, or without ``inspect-ai``."""
        import_inspect()
        if not self.task_list():
            raise ConfigurationError("tasks: got none, expected a file or the name of a task")
        for name in ("max_tokens", "num_choices", "max_connections", "limit", "epochs"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigurationError(f"{name}: got {value}, expected at least 1")
        self.task_arguments()

    def task_list(self) -> list[Any]:
        """Returns the tasks one by one; raises ConfigurationError for a file that is missing."""
        if isinstance(self.tasks, str):
            return [_task_name(name) for name in self.tasks.split(",") if name.strip()]
        tasks = self.tasks if isinstance(self.tasks, (list, tuple)) else [self.tasks]
        return [_task_name(task) if isinstance(task, str) else task for task in tasks]

    def task_arguments(self) -> dict[str, Any]:
        """Returns ``task_args`` as a dictionary."""
        try:
            arguments = json.loads(self.task_args or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ConfigurationError(f"task_args: got {self.task_args!r}, expected a JSON object")
        return arguments

    def __call__(self) -> InspectEvaluator:
        """Returns the evaluator; raises ConfigurationError for invalid settings."""
        self.check()
        return InspectEvaluator(self)


class InspectEvaluator(SamplingClientEvaluator):
    """Runs tasks of Inspect on the weights of a sampling client.

    Metrics for each task, where NAME is the name of its dataset (or of the task, if the dataset has
    none or two tasks share it):

    - ``NAME/METRIC``: the metrics of the first scorer, as in the official package.
    - ``NAME/SCORER/METRIC``, or ``NAME/SCORER/REDUCER/METRIC``: the metrics of every scorer, if a
      task has several scorers, or reduces epochs in several ways.
    - ``NAME/num_examples`` and ``NAME/num_errors``.

    ``last_logs`` holds the logs of the last call, without their samples.
    """

    def __init__(self, config: InspectEvaluatorBuilder) -> None:
        self.config = config
        self.last_logs: list[EvalLog] = []

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Evaluates the weights of ``sampling_client``.

        Raises:
            EvalError: a task could not be finished.
        """
        if self.config.model_name is None:
            raise ConfigurationError("model_name: got none, expected the base model of the client")
        model = make_model(self.config, sampling_client, self.config.model_name)
        return metrics_of(await self.run(model, display="none"))

    async def run(self, model: Model, *, display: str) -> list[EvalLog]:
        """Runs the tasks on a model of Inspect and returns the logs, without their samples.

        Args:
            model: Model to evaluate.
            display: Inspect's display: ``none``, ``plain`` or ``rich``.

        Raises:
            ConfigurationError: Inspect does not know a task.
            EvalError: a task could not be finished.
            CancelledError: after Ctrl-C; ``last_logs`` then has the finished part.
        """
        inspect_ai = import_inspect()
        from inspect_ai._util.error import PrerequisiteError
        from inspect_ai.log import list_eval_logs, read_eval_log

        config, log_dir = self.config, str(ensure_writable_dir(self.log_dir(), "log_dir"))
        before = {info.name for info in list_eval_logs(log_dir)}
        with _inspect_console(display), local_data(config.data_path):
            try:
                logs = await inspect_ai.eval_async(
                    tasks=config.task_list(),
                    model=[model],
                    task_args=config.task_arguments(),
                    metadata=config.metadata,
                    log_dir=log_dir,
                    log_level=config.log_level.lower(),
                    limit=config.limit,
                    epochs=config.epochs,
                    debug_errors=config.debug_errors,
                    # No retries: the engine would fail in the same way again.
                    retry_on_error=0,
                    fail_on_error=config.debug_errors,
                    max_connections=config.max_connections,
                    # Write each sample to the log as soon as it is done.
                    log_buffer=1,
                    log_header_only=True,
                    # Do not open a socket for other programs.
                    ctl_server=False,
                )
            except (PrerequisiteError, LookupError) as error:
                # A KeyError or an IndexError may also come from a task's own code.
                if type(error) not in (PrerequisiteError, LookupError):
                    raise
                names = ", ".join(map(str, config.task_list()))
                raise ConfigurationError(
                    f"tasks: got {names}, expected files or registered tasks such as "
                    f"inspect_evals/ifeval: {getattr(error, 'message', error)}"
                ) from error
        if not logs or any(log.status == "cancelled" for log in logs):
            # Inspect ends a cancelled evaluation without an error and without logs. Its caller,
            # such as a training loop, would continue after Ctrl-C.
            new = [info for info in list_eval_logs(log_dir) if info.name not in before]
            self.last_logs = [read_eval_log(info, header_only=True) for info in new]
            raise asyncio.CancelledError
        self.last_logs = logs
        for log in logs:
            if log.status == "error" and log.error is not None:
                raise EvalError(f"{log.eval.task}: {log.error.message}; the log is {log.location}")
        return logs

    def log_dir(self) -> Path:
        """Returns the folder of the logs."""
        if self.config.log_dir is not None:
            return Path(self.config.log_dir).expanduser()
        run = current_run_folder()
        return Path(DEFAULT_LOG_DIR).expanduser() if run is None else run / "inspect-logs"


def make_model(
    config: InspectEvaluatorBuilder,
    sampling_client: SamplingClient,
    model_name: str,
    renderer_name: str | None = None,
    model_path: str | None = None,
) -> Model:
    """Returns Inspect's model of a sampling client, with the sampling settings of ``config``."""
    from inspect_ai.model import GenerateConfig, Model

    from tinker_cookbook.eval.inspect_bridge.model import InspectAPIFromTinkerSampling

    renderer_name = renderer_name or config.renderer_name
    # Inspect's decorator hides the constructor's arguments from type checkers.
    api_class: Any = InspectAPIFromTinkerSampling
    api = api_class(
        renderer_name=renderer_name,
        model_name=model_name,
        sampling_client=sampling_client,
        verbose=config.verbose,
        include_reasoning=config.include_reasoning,
    )
    settings = GenerateConfig(
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        top_p=config.top_p,
        top_k=config.top_k,
        num_choices=config.num_choices,
        seed=config.seed,
    )
    # The logs record which weights and which chat format produced the scores.
    arguments = {"model_path": model_path, "renderer_name": renderer_name}
    return Model(api, settings, {k: v for k, v in arguments.items() if v is not None})


def metrics_of(logs: Sequence[EvalLog]) -> dict[str, float]:
    """Returns the metrics of the logs, named as in :class:`InspectEvaluator`."""
    metrics: dict[str, float] = {}
    for name, log in zip(_names(logs), logs, strict=True):
        results = log.results
        if results is None:
            continue
        for i, score in enumerate(results.scores):
            where = [name, score.name, *([score.reducer] if score.reducer else [])]
            for metric, found in score.metrics.items():
                if i == 0:
                    metrics[f"{name}/{metric}"] = found.value
                if len(results.scores) > 1:
                    metrics["/".join([*where, metric])] = found.value
        metrics[f"{name}/num_examples"] = results.total_samples
        metrics[f"{name}/num_errors"] = results.total_samples - results.completed_samples
    return metrics


def _task_name(name: str) -> str:
    path, at, task = name.strip().partition("@")
    if not path.endswith((".py", ".ipynb")):
        return name.strip()
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigurationError(f"tasks: there is no file {path}")
    # Inspect finds files by a pattern in the working folder, so absolute paths do not work.
    return os.path.relpath(file) + at + task


def _names(logs: Sequence[EvalLog]) -> list[str]:
    datasets = [log.eval.dataset.name for log in logs]
    return [
        dataset if dataset and datasets.count(dataset) == 1 else log.eval.task
        for dataset, log in zip(datasets, logs, strict=True)
    ]


def import_inspect() -> Any:
    """Returns ``inspect_ai``; raises ConfigurationError if it is not installed."""
    try:
        import inspect_ai
    except ImportError as error:
        raise missing_extra("evaluations of Inspect AI", error, "inspect") from error
    return inspect_ai


@contextmanager
def _inspect_console(display: str) -> Iterator[None]:
    """Sets Inspect's display inside the block, and removes its log handler afterwards.

    Inspect adds a handler to the root logger and sets its level for the rest of the process, so
    that each message of a training run would be printed twice.
    """
    from inspect_ai.util._display import init_display_type

    # The user's choice of a display takes precedence.
    init_display_type(os.environ.get("INSPECT_DISPLAY", display))
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)
