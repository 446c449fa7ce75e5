"""Session of a training run: its folder, log, backend, client, checkpoints and evaluations.

Every loop opens a session::

    async with training_session(config, train_set, total_steps) as session:
        client = await session.start(total_steps)
        ...
            await session.finish_step(step, metrics, epoch=...)

The order at the end of a step is fixed here, because resuming depends on it: evaluate, write the
row, save, append the checkpoint's line. A run killed between any two of these resumes from
the last line and writes the same rows again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.backends import Connection, SamplingClient, TrainingClient
from tinker_cookbook.backends.connect import connect_with, is_interruption
from tinker_cookbook.checkpoint_utils import (
    CheckpointRecord,
    RunCheckpoints,
    SavePolicy,
    SaveReason,
    get_last_checkpoint,
    load_checkpoints_file,
)
from tinker_cookbook.engine.model.resolve import resolve_model
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.eval.evaluators import Evaluator, TrainingClientEvaluator
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, DataError
from tinker_cookbook.leaves import find_leaf
from tinker_cookbook.record.write import RecordWriter
from tinker_cookbook.run import replaced_run
from tinker_cookbook.run.best import BestEvaluation
from tinker_cookbook.run.changes import check_same_settings
from tinker_cookbook.run.config import dump_config
from tinker_cookbook.run.current import evaluation_at_step, run_in_folder
from tinker_cookbook.run.data_record import data_record, write_data_record
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.loggers import Logger, format_value
from tinker_cookbook.run.ml_log import start_logging
from tinker_cookbook.run.paths import LOG_FILE, METRICS_FILE, local_path
from tinker_cookbook.run.resume import check_not_passed, newest_saved
from tinker_cookbook.run.weights import create_training_client
from tinker_cookbook.training import commands
from tinker_cookbook.training.config import TrainingConfig, checkpoint_interval, recorded_renderer
from tinker_cookbook.training.diagnosis.causes import KEY, Diagnosis, as_text, causes_of
from tinker_cookbook.training.restarts import server_is_gone, watch_server
from tinker_cookbook.training.server_needs import ServerCheck
from tinker_cookbook.training.setting_lines import setting_lines
from tinker_cookbook.training.tracing import RunTrace
from tinker_cookbook.utils.activity import activity, short_time
from tinker_cookbook.utils.command_line.entrypoint import program_takes, terminated
from tinker_cookbook.utils.error_logs import RUN_STOPPED, only_to_file
from tinker_cookbook.utils.heartbeat import reporting_activity
from tinker_cookbook.utils.terminal import get_console
from tinker_cookbook.utils.trace import scope_span

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

Metrics = dict[str, float | int | str]


@asynccontextmanager
async def training_session(
    config: TrainingConfig, data: Sized, total_steps: int
) -> AsyncIterator[TrainingSession]:
    """Checks the settings, locks the folder, opens the log; closes the backend at the end.

    ``data`` is the training set, and ``total_steps`` the length of the whole run. Raises
    ConfigurationError if the folder holds a run on other data, or a longer unfinished one.
    """
    config.check()
    # A killed process may have left the replaced run under a temporary name.
    replaced_run.recover(config.log_path)
    # Lock before reading anything: two processes must not write to the same run.
    with RunLock(config.log_path), run_in_folder(config.log_path), reporting_activity():
        last = get_last_checkpoint(config.log_path)
        changes: list[str] = []
        # In a thread, because a large dataset takes seconds.
        with activity().phase("reading the data"):
            record = await asyncio.to_thread(data_record, data)
        if last is not None:
            # Compare before the log is opened, which replaces config.json.
            allowed = config.allow_config_change
            changes = check_same_settings(config.log_path, config, allowed, record)
            check_not_passed(last, total_steps)
        log = start_logging(
            config.log_path,
            config.wandb_project,
            config.wandb_name,
            config,
            trackers=config.trackers,
            # Remove rows after the checkpoint, because the run writes them again.
            resume_step=last.batch if last is not None else -1,
            print_metrics=False,
        )
        write_data_record(config.log_path, record)
        begins = (last.batch or 0) if last is not None else 0
        session = TrainingSession(
            config, log, last, RecordWriter(config.log_path, config.record, begins)
        )
        session.print(*changes)
        try:
            with session.step_record:
                yield session
        # BaseException, so that the command to continue is printed after Ctrl-C too.
        except BaseException as error:
            # The terminal may be closed when the cause is looked for.
            logger.error(RUN_STOPPED, exc_info=error, extra=only_to_file())
            session.print(*session.continue_lines(error))
            if not (is_interruption(error) or isinstance(error, ConfigurationError)):
                session.print(f"traceback: {local_path(config.log_path) / LOG_FILE}")
            session.close(error)
            raise
        session.close()
    # The folder is free now, so the report says that the run has ended.
    session.print(*await asyncio.to_thread(_write_report, config.log_path))


def _write_report(log_path: str) -> list[str]:
    """Writes ``report.html`` and returns a line that names it; a problem is only logged."""
    try:
        reporting = find_leaf("view.report")
        if reporting is None:
            return []
        path = local_path(log_path)
        return [f"report       {reporting.write_report(path, path / reporting.FILE)}"]
    except Exception as error:  # the run has succeeded
        logger.warning("no report.html was written: %r", error, exc_info=True)
        return []


class TrainingSession:
    """One run from the checkpoint ``last`` (after ``start_step`` updates) to its end."""

    def __init__(
        self,
        config: TrainingConfig,
        log: Logger,
        last: CheckpointRecord | None,
        record: RecordWriter,
    ) -> None:
        self.step_record = record
        self.config = config
        self.last = last
        self.start_step = (last.batch or 0) if last is not None else 0
        self.evaluators: list[Evaluator] = []
        self.infrequent_evaluators: list[Evaluator] = []
        self.extra_evaluators: list[Evaluator] = []
        """Additional evaluations of the objective."""
        self.shows: Callable[[str], bool] = lambda name: not name.split("/")[-1].startswith("num_")
        """Selects the evaluation metrics to print."""
        self._log = log
        self._console: Console = get_console()
        self._saved_any = last is not None
        self.best = BestEvaluation.of(config)
        self._config_data = dump_config(config)
        self._diagnosis = Diagnosis(self._config_data)
        self.stopped = False
        """Whether the run stops early, because evaluations no longer improve."""
        self._eval_seconds = 0.0
        self._finished_any = False
        self._end_watch: Callable[[], None] = lambda: None
        self._trace = RunTrace(config.log_path, config.enable_trace, config.span_chart_every)

    async def start(self, total_steps: int) -> TrainingClient:
        """Prints the settings, connects, and creates or restores the training client."""
        config = self.config
        self.total_steps = total_steps
        every = checkpoint_interval(config, total_steps)
        # The default, None, says nothing about when a checkpoint is there.
        self.print(*setting_lines(chz.replace(config, save_every=every), config.log_path))
        # Stored with the run at the backend, without absent values.
        metadata = {
            "recipe": config.recipe_name,
            # ``tinker_cookbook.runs`` finds the log folder of weights by these two.
            "log_path": str(local_path(config.log_path).resolve()),
            "host": socket.gethostname(),
        }
        renderer_name = recorded_renderer(config)
        if renderer_name is not None:
            metadata["renderer_name"] = renderer_name
        else:
            self.print(
                "renderer_name is not set, so no chat format is recorded: chat, eval and exports "
                "will take the one that is recommended for the model"
            )
        if config.session_name is not None:
            metadata["session_name"] = config.session_name
        with activity().phase("connecting"):
            self.connection: Connection = connect_with(
                config, sampler=SamplerSettings.of(config), user_metadata=metadata
            )
        # Remote backends check models themselves.
        source = ""
        if self.connection.kind == "local":
            resolved = resolve_model(config.model_name)
            source = f" ({resolved.source}{f'; {resolved.note}' if resolved.note else ''})"
        self.print(*self.connection.reasons, f"model: {config.model_name}{source}")
        if (url := self.connection.url) is not None:
            activity().place = f"at {url}"
        self.step_record.connect(self.connection)
        self._end_watch = watch_server(self.connection)
        service = self.connection.service
        # Before sampling and training: a missing server feature could otherwise fail after many
        # steps.
        check = ServerCheck(self.connection, config.model_name)
        await check.check_model()
        if self.last is not None:
            self.last, lines = await newest_saved(service, config.log_path)
            self.start_step = self.last.batch or 0
            self.print(*lines)
        with activity().phase("loading the model"):
            self.client = await create_training_client(service, config, self.last, metadata)
            await check.check_needs(self.client, config.server_needs())
        self.print(*check.lines)
        if self.last is not None and self.last.state_path is not None:
            self.print(f"continuing after step {self.start_step} from {self.last.state_path}")
        self.checkpoints = RunCheckpoints(
            self.client,
            config.log_path,
            SavePolicy(
                save_every=every,
                save_every_tokens=config.save_every_tokens,
                save_every_seconds=config.save_every_seconds,
                rolling_save_every=config.rolling_save_every,
                ttl_seconds=config.ttl_seconds,
                rolling_ttl_seconds=config.rolling_ttl_seconds,
            ),
            total_steps,
            # A resumed run saves at the same token counts as an uninterrupted one.
            tokens_done=self.restored("cumulative_tokens", 0),
            rest_client=service.create_rest_client(),
        )
        if self.last is not None:
            # The rows end at the checkpoint, so this state equals that of an uninterrupted run.
            rows = read_rows(local_path(config.log_path) / METRICS_FILE)
            self._diagnosis.restore(rows)
            if self.best is not None:
                self.best.restore(rows)
        if self.last is not None and self.start_step == total_steps and not self.last.final:
            # The run was shortened to its newest checkpoint, so no later step saves a final one.
            extra = {k: v for k, v in self.last.extra.items() if k not in ("best", "rolling")}
            await self.checkpoints.save_async(self.start_step, self.last.epoch or 0, "final", extra)
        self._trace.start(self.start_step + 1)
        return self.client

    def restored(self, key: str, default: int) -> int:
        """Returns the value of a counter in the checkpoint that the run continues from."""
        return default if self.last is None else int(self.last.extra.get(key, default))

    def boundary(self, step: int, tokens: int) -> bool:
        """Returns whether an evaluation or a checkpoint is due after update ``step``.

        A loop with steps in flight must not submit steps beyond a boundary before ``finish_step``.
        """
        return (
            self.checkpoints.due(step, tokens) is not None
            or self._due(step, self.config.eval_every)
            or self._due(step, self.config.infrequent_eval_every)
        )

    async def finish_step(
        self,
        step: int,
        metrics: Metrics,
        *,
        epoch: int,
        counters: dict[str, int],
        before_save: Callable[[], None] | None = None,
    ) -> None:
        """Runs due evaluations and checkpoints after update ``step``; writes the step's row.

        ``before_save`` writes further parts of a due checkpoint. The checkpoint's
        line is written last, so it marks the checkpoint as complete.
        """
        # Write the row before the checkpoint: rows after the last checkpoint can be removed and
        # written again.
        evaluated = await self.evaluate(step)
        self.write_row({**metrics, **evaluated}, step)
        self._finished_any = True
        reason = self.checkpoints.due(step, counters.get("cumulative_tokens", 0))
        state: dict[str, Any] = dict(counters)
        best, saves = self.best, list[SaveReason]()
        # Save the best checkpoint first, because a run resumes from the last line.
        if best is not None and best.step == step:
            saves.append("best")
        if best is not None and best.exhausted and best.metric in evaluated and reason != "final":
            self.stopped, reason = True, "final"
            state["stopped_early"] = best.patience
            self.print(
                f"stopped after step {step}: {best.without} evaluations were not better than "
                f"{best.describe()} (early_stopping_patience={best.patience})"
            )
        if reason is not None:
            saves.append(reason)
        if saves:
            if before_save is not None:
                before_save()
            # The rows must be on disk before a checkpoint's line refers to them.
            self._log.sync()
        for reason in saves:
            kept = {"best_metric": best.metric, "best_value": best.value} if best else {}
            extra = {**state, **kept} if reason == "best" else state
            async with scope_span("save_checkpoint"):
                with activity().phase("saving a checkpoint"):
                    record = await self.checkpoints.save_async(step, epoch, reason, extra)
            self._saved_any = True
            logger.info("checkpoint after step %d: %s", step, record.state_path)
        self._trace.next(step)

    def write_row(self, row: Metrics, step: int) -> None:
        """Appends the row of a step, with its diagnosis, to the log in one write."""
        if causes := self._diagnosis.add(row, step):
            row = {**row, KEY: as_text(causes)}
        self._log.log_metrics(row, step=step)
        # Each cause once in a run: the rows have it at every step.
        for cause in self._diagnosis.new(causes):
            logger.warning("step %d: %s", step, cause)

    def print(self, *lines: str) -> None:
        """Prints lines to the terminal."""
        # In one call, which in a notebook is one output.
        if lines:
            text = "\n".join(lines)
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    async def evaluate(self, step: int) -> Metrics:
        """Runs evaluations that are due after update ``step``; returns their metrics."""
        due: list[Evaluator] = []
        if self._due(step, self.config.eval_every):
            due += self.evaluators
        if self._due(step, self.config.infrequent_eval_every):
            due += self.infrequent_evaluators
        if not due:
            # A run without steps and evaluations would end without a result.
            if self.total_steps == 0:
                raise ConfigurationError(
                    "max_steps=0 evaluates without training, but there is nothing to evaluate; "
                    "give held-out data (test_path, test_size or num_test) or an evaluator, and "
                    "eval_every=1"
                )
            return {}
        started = time.monotonic()
        async with scope_span("run_evals"):
            with evaluation_at_step(step), activity().phase("evaluating"):
                metrics = await run_evaluators(due, self.client)
        if self.best is not None:
            # All evaluations run before the first step, so a misspelt metric fails here.
            if step == 0:
                self.best.check_measured(metrics)
            self.best.update(step, metrics)
        shown = "  ".join(
            f"{name} {format_value(value)}" for name, value in metrics.items() if self.shows(name)
        )
        self.print(f"step {step}/{self.total_steps}  {shown}")
        self._eval_seconds = time.monotonic() - started
        return {**metrics, "time/eval": self._eval_seconds}

    def eval_seconds_after(self, step: int) -> float:
        """Returns the seconds of all evaluations after ``step``, each as long as the last one."""
        every = self.config.eval_every
        due = sum(self._due(at, every) for at in range(step + 1, self.total_steps + 1))
        return self._eval_seconds * due

    def _due(self, step: int, every: int) -> bool:
        """Returns true before training, every ``every`` steps, and after the last one; never for
        0."""
        return every > 0 and (step % every == 0 or step == self.total_steps)

    async def sampling_client(self, *, record_stability_info: bool = False) -> SamplingClient:
        """Returns a client for the current weights."""
        # Passed only for ``stable_reinforce``, because older SDKs lack this argument.
        options = {"record_stability_info": True} if record_stability_info else {}
        async with scope_span("save_weights_and_get_sampling_client"):
            with activity().phase("taking the new weights"):
                return await self.client.save_weights_and_get_sampling_client(**options)

    def continue_lines(self, error: BaseException) -> list[str]:
        """Returns how to continue after an error or Ctrl-C; empty if that cannot help."""
        command = commands.continue_command(self.config.log_path)
        interrupted = is_interruption(error)
        gone = server_is_gone(error)
        if not (self._saved_any or interrupted or gone):
            return []
        if gone and self.config.server_wait:
            return []  # the run continues by itself
        # Before the first step these errors come from settings or data, so a retry would fail too.
        if isinstance(error, (ConfigurationError, CheckpointError, DataError)) and (
            not self._finished_any
        ):
            return []
        by = ("SIGTERM" if terminated() else "Ctrl-C") if interrupted else type(error).__name__
        if gone:
            by = "the loss of its server"
        saved = "" if self._saved_any else " before the first checkpoint"
        if command is None:  # a script or a notebook
            return [f"stopped by {by}{saved}; run again with behavior_if_log_dir_exists='resume'"]
        if gone and program_takes("server_wait") and "server_wait=" not in command:
            command += " server_wait=600"
        return [f"stopped by {by}{saved}; continue with:", f"  {command}"]

    def summary(self) -> list[str]:
        """Returns the run's paths, and the commands to use, continue and plot it, one per line."""
        log_path, seconds = self.config.log_path, self.config.ttl_seconds
        final = get_last_checkpoint(log_path)
        lines = [f"logs         {log_path}"]
        # A run that ended before its first checkpoint has no weights.
        if final is not None:
            lines.append(f"weights      {final.state_path}")
            if final.sampler_path:
                lines.append(f"for sampling {final.sampler_path}")
                lines += commands.use_lines(self.config, final.sampler_path)
                tested = self.config.eval_every and (self.evaluators or self.infrequent_evaluators)
                own = commands.own_evaluation(log_path, final.state_path) if tested else None
                # The run's own held-out data say more than a benchmark of other questions.
                lines = [own if own and x.startswith("evaluate ") else x for x in lines]
        listed = load_checkpoints_file(log_path)
        for record in [record for record in listed if record.extra.get("best")][-1:]:
            lines.append(
                f"best         {record.sampler_path} ({record.get('best_metric')} "
                f"{record.get('best_value'):.5g} after step {record.batch})"
            )
        periodic = [c for c in listed if not c.final and not c.extra.get("best")]
        if seconds is not None and periodic:
            life = f"{seconds / 86400:.3g} days" if seconds >= 86400 else short_time(seconds)
            lines.append(
                f"checkpoints  {len(periodic)} more in checkpoints.jsonl, each deleted "
                f"{life} after it was saved (ttl_seconds); the final one stays"
            )
        causes = causes_of(read_rows(local_path(log_path) / METRICS_FILE), self._config_data)
        lines += [f"why          {cause}" for cause in causes[:3]]
        command = commands.continue_command(log_path)
        if command is not None:
            lines.append(f"continue     {command}")
        lines += filter(None, [commands.repeat_line(log_path, self._config_data)])
        return [*lines, f"plot         {commands.plot_command(log_path)}"]

    def close(self, error: BaseException | None = None) -> None:
        """Closes the log and the backend; reports the ``error`` that ended the run."""
        self._trace.close()
        connection: Connection | None = getattr(self, "connection", None)  # none before ``start``
        self._end_watch()
        if connection is not None:
            connection.close_after(error)
        self._log.close()


async def run_evaluators(evaluators: Sequence[Evaluator], client: TrainingClient) -> Metrics:
    """Runs evaluators on the client's current weights; sampling evaluators share one snapshot."""
    metrics: Metrics = {}
    snapshot: SamplingClient | None = None
    for evaluator in evaluators:
        activity().details["evaluating"] = ""  # what the one before said
        if isinstance(evaluator, TrainingClientEvaluator):
            metrics.update(await evaluator(client))
        else:
            # Created at first use, because loss evaluators need no snapshot.
            if snapshot is None:
                snapshot = await client.save_weights_and_get_sampling_client()
            metrics.update(await evaluator(snapshot))
    return metrics


def is_complete(session: TrainingSession, total_steps: int) -> bool:
    """Returns whether the run is finished, and prints that. A run of 0 steps has evaluations."""
    last, patience = session.last, session.config.early_stopping_patience
    # The same or a smaller patience would stop it at the same step again.
    if last is not None and last.final and 0 < patience <= (last.get("stopped_early") or 0):
        session.print(
            f"This run stopped early after step {session.start_step}; a larger "
            "early_stopping_patience continues it.",
            *session.summary(),
        )
        return True
    if session.start_step < total_steps or total_steps == 0 == session.start_step:
        return False
    if last is not None and not last.final:
        return False  # ``start`` makes this checkpoint the final one
    session.print(
        f"This run is complete ({session.start_step} steps); num_epochs or max_steps can make it "
        "longer.",
        *session.summary(),
    )
    return True
