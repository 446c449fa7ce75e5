"""The trackers of a run: Weights & Biases, Trackio, TensorBoard and MLflow."""

# ruff: noqa: D102 (the methods are described in ``Logger``)

from __future__ import annotations

import html
import json
import logging
import os
import re
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import dump_config
from tinker_cookbook.run.jsonl import NONFINITE_KEY, read_rows
from tinker_cookbook.run.loggers import Logger, Metrics
from tinker_cookbook.run.paths import METRICS_FILE, write_atomically
from tinker_cookbook.utils.imports import missing_extra

logger = logging.getLogger(__name__)

FINISH_SECONDS = 20.0
"""Longest time in which Weights & Biases sends the rest at the end of a run."""
DEFAULT_PROJECT = "tinker-cookbook"
_MODULES = {"tensorboard": "torch.utils.tensorboard"}


def package_of(tracker: str) -> Any:
    """Imports the package of a tracker; raises ``ConfigurationError`` if it is not installed."""
    try:
        return import_module(_MODULES.get(tracker, tracker))
    except ImportError as error:
        raise missing_extra(f"trackers={tracker}", error, tracker) from error


class RemoteLogger(Logger):
    """A run at a tracker; ``log_path/TRACKER_run.json`` keeps its id and the last step that it has.

    A logger on the same folder continues the run. ``None`` as folder: each logger starts a run.
    ``resume_step`` is the last step that is kept in the folder; ``None`` keeps all.
    """

    tracker: ClassVar[str]

    def __init__(
        self,
        project: str | None,
        log_dir: str | os.PathLike[str] | None,
        name: str | None,
        resume_step: int | None = None,
    ) -> None:
        self._package = package_of(self.tracker)
        self._folder = None if log_dir is None else Path(log_dir).absolute()
        self._run: dict[str, Any] = {
            "id": None,
            "project": project or DEFAULT_PROJECT,
            "name": name or (None if self._folder is None else self._folder.name),
            "step": -1,
        }
        file = self._file
        known = json.loads(file.read_bytes()) if file is not None and file.exists() else None
        if known is not None:
            self._run |= {"name": known["name"], "id": known["id"]}
        self.known: str | None = self._run["id"]
        self._resume_step = resume_step
        self._has: int | None = None
        """The last step that the tracker has and that the folder keeps."""
        if resume_step is not None:
            # Files of earlier versions have no step.
            self._has = -1 if known is None else min(resume_step, known.get("step", resume_step))
            self._run["step"] = self._has

    @property
    def run_id(self) -> str:
        """The id under which the run is continued."""
        return self._run["id"]

    @property
    def _file(self) -> Path | None:
        return None if self._folder is None else self._folder / f"{self.tracker}_run.json"

    def keep(self, step: int | None = None, **run: str) -> None:
        """Writes what is known of the run, and the step until which the tracker has all."""
        self._run |= run if step is None else {"step": step}
        if self._file is not None:
            write_atomically(self._file, json.dumps(self._run).encode() + b"\n")

    def catch_up(self) -> None:
        """Logs the rows of ``metrics.jsonl`` that the tracker does not have."""
        if self._folder is None or self._resume_step is None or self._has is None:
            return
        for row in read_rows(self._folder / METRICS_FILE):
            step = row.get("step")
            if isinstance(step, int) and self._has < step <= self._resume_step:
                row |= {name: float(text) for name, text in row.pop(NONFINITE_KEY, {}).items()}
                self.log_metrics({k: v for k, v in row.items() if k != "step"}, step)


class WandbLogger(RemoteLogger):
    """A run of Weights & Biases.

    Metrics are plotted over their own ``step``, not over the number of calls: a resumed run repeats
    steps that were logged before it was killed, and Weights & Biases drops rows whose call count
    decreases. It cannot remove the first rows of these steps.

    Args:
        project: Project of the run.
        config: Its configuration.
        log_dir: The run's folder, where the logger of a resumed run finds its id.
        wandb_name: Its display name; default: the folder's name.

    Raises:
        ConfigurationError: wandb is not installed, or it has no key and no terminal to request one.
    """

    tracker = "wandb"

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        wandb_name: str | None = None,
        *,
        resume_step: int | None = None,
    ) -> None:
        super().__init__(project, log_dir, wandb_name, resume_step)
        # Also of its process, which would hold the program for minutes after the end.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{FINISH_SECONDS:g}")
        try:
            self.run = self._package.init(
                mode=self._mode(),
                project=self._run["project"],
                name=self._run["name"],
                dir=None if log_dir is None else os.fspath(log_dir),
                config=None if config is None else dump_config(config),
                id=self.known,
                resume="allow" if self.known else None,
            )
        except self._package.errors.UsageError as error:
            raise ConfigurationError(
                f"Weights & Biases cannot start (trackers=wandb, wandb_project={project}): {error};"
                " run `wandb login`, set WANDB_MODE=offline, or leave these settings out"
            ) from error
        # Plots over our own step: see the docstring of the class.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.keep(id=self.run.id)

    def _mode(self) -> Literal["offline"] | None:
        settings = self._package.setup().settings
        if settings.mode in ("offline", "disabled", "dryrun"):
            return None
        # Its own start would hang for minutes, also at the program's end.
        try:
            urllib.request.urlopen(settings.base_url, timeout=5).close()
        except OSError as error:
            if getattr(error, "code", 500) >= 500:
                logger.warning(
                    "%s cannot be reached (%s): Weights & Biases is logged offline; `wandb sync` "
                    "sends what is in wandb/offline-run-* of the run's folder later",
                    settings.base_url,
                    error,
                )
                return "offline"
        return None

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        self.run.log(dict(metrics) if step is None else {"step": step, **metrics})

    def log_summary(self, metrics: Metrics) -> None:
        self.run.summary.update(dict(metrics))

    def log_hparams(self, config: Any) -> None:
        # A resumed run may have other settings.
        self.run.config.update(dump_config(config), allow_val_change=True)

    def log_long_text(self, key: str, text: str) -> None:
        self.run.log({key: self._package.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        self.run.finish()

    def get_logger_url(self) -> str | None:
        return None if self.run.offline else self.run.url


class TrackioLogger(RemoteLogger):
    """A run of Trackio, with sampled episodes as its traces.

    Episodes are read from the run's record (``record=full``): one of each of the first
    ``TRACES`` groups of a step and split, after the next step was logged. Rows of a resumed run
    after its checkpoint are removed from Trackio's file; on a server they stay.

    Args:
        project: Its project.
        config: The run's configuration; Trackio takes it only here.
        log_dir: The run's folder.
        trackio_name: Name of the run; default: the folder's name.
        resume_step: Rows of later steps are removed; ``None`` keeps all.

    Raises:
        ConfigurationError: trackio is not installed.
    """

    tracker = "trackio"
    TRACES = 4

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        trackio_name: str | None = None,
        *,
        resume_step: int | None = None,
    ) -> None:
        super().__init__(project, log_dir, trackio_name, resume_step)
        self._traced = -1 if self._has is None else self._has
        settings = {} if config is None else dump_config(config)
        self.run = self._package.init(
            project=self._run["project"],
            name=self._run["name"],
            # Trackio refuses names with this beginning, which only load_config needs.
            config={key: value for key, value in settings.items() if key[0] != "_"},
            resume="allow" if self.known else "never",
            embed=False,
        )
        if self.known:
            # Several runs may have this name; Trackio takes the newest.
            self.run.id = self.known
        self.keep(id=self.run.id, name=self.run.name)
        if self.known and self._has is not None:
            self._remove_after(self._has)

    def _remove_after(self, step: int) -> None:
        storage = import_module("trackio.sqlite_storage").SQLiteStorage
        path = storage.get_project_db_path(self._run["project"])
        if path.exists():
            with sqlite3.connect(path, timeout=10) as database:
                for table in ("metrics", "traces"):
                    where = "WHERE run_id = ? AND step > ?"
                    database.execute(f"DELETE FROM {table} {where}", (self.run.id, step))
            database.close()

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        self.run.log(dict(metrics), step=step)
        if step is not None:
            self._log_traces(step)

    def _log_traces(self, before: float) -> None:
        # A tenth of a second, which only this logger needs.
        from tinker_cookbook.record.messages import sampled_messages
        from tinker_cookbook.record.read import Record

        # The record of a step may be written after its row, so a step waits for the next one.
        if self._folder is None:
            return
        record = Record(self._folder)
        for step, splits in record.steps().items():
            if self._traced < step < before:
                self._traced = step
                traces = {
                    f"episodes/{split}": [self._package.Trace(*found) for found in episodes]
                    for split in splits
                    if (episodes := sampled_messages(record, step, split, self.TRACES))
                }
                if traces:
                    self.run.log(traces, step=step)

    def close(self) -> None:
        self._log_traces(float("inf"))
        self.run.finish()


class TensorBoardLogger(RemoteLogger):
    """Event files in ``log_path/tensorboard``, for ``tensorboard --logdir``.

    Numbers are kept in single precision.

    Args:
        log_dir: The run's folder.
        resume_step: TensorBoard hides what was logged for later steps; ``None`` hides nothing.

    Raises:
        ConfigurationError: tensorboard is not installed.
    """

    tracker = "tensorboard"

    def __init__(self, log_dir: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        super().__init__(None, log_dir, None, resume_step)
        purge = None if self._has is None else max(self._has + 1, 0)
        folder = os.path.join(log_dir, "tensorboard")
        self._writer = self._package.SummaryWriter(folder, purge_step=purge)
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        numbers, texts = split_metrics(metrics)
        # One event for all numbers; add_scalar makes one for each, which takes ten times as long.
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), step)
        for name, text in texts.items():
            self._writer.add_text(name, text, step)
        # It writes only every two minutes by itself, which a killed run would lose.
        self._writer.flush()

    def log_hparams(self, config: Any) -> None:
        text = json.dumps(dump_config(config), indent=1, default=str)
        self.log_long_text("config", text)

    def log_long_text(self, key: str, text: str) -> None:
        # Four spaces make a line preformatted text.
        self._writer.add_text(key, "".join(f"    {line}\n" for line in text.splitlines()))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MlflowLogger(RemoteLogger):
    """A run of MLflow, at the server in ``MLFLOW_TRACKING_URI``.

    MLflow cannot remove values: for the steps that a resumed run repeats it keeps both, and shows
    the later one as the latest. Parameters are those of the first start.

    Args:
        project: Its experiment.
        config: The run's configuration, as parameters.
        log_dir: The run's folder.
        mlflow_name: Name of the run; default: the folder's name.

    Raises:
        ConfigurationError: mlflow-skinny is not installed, or it finds no store.
    """

    tracker = "mlflow"

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        mlflow_name: str | None = None,
        *,
        resume_step: int | None = None,
    ) -> None:
        super().__init__(project, log_dir, mlflow_name, resume_step)
        self._entities = import_module("mlflow.entities")
        try:
            client = self._client = self._package.MlflowClient()
        except self._package.exceptions.MlflowException as error:
            raise ConfigurationError(
                f"trackers=mlflow: MLflow finds no store ({str(error)[:200]}…); set "
                "MLFLOW_TRACKING_URI to the address of a server, http://HOST:PORT"
            ) from error
        self._step = 0
        if self.known:
            client.update_run(self.known, status="RUNNING")
        else:
            name = self._run["project"]
            found = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if found is None else found.experiment_id
            self.keep(id=client.create_run(experiment, run_name=self._run["name"]).info.run_id)
        if config is not None:
            self.log_hparams(config)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        numbers, texts = split_metrics(metrics)
        self._step, now = self._step if step is None else step, int(time.time() * 1000)
        found = [
            self._entities.Metric(_mlflow_name(name), value, now, self._step)
            for name, value in numbers.items()
        ]
        tags = [self._entities.RunTag(_mlflow_name(k), text[:5000]) for k, text in texts.items()]
        for start in range(0, len(found) or 1, 900):
            part = found[start : start + 900]  # a request takes 1000 items
            self._client.log_batch(self.run_id, part, tags=tags, synchronous=True)

    def log_hparams(self, config: Any) -> None:
        # A parameter cannot be changed.
        known = self._client.get_run(self.run_id).data.params
        values = {_mlflow_name(k): str(v)[:6000] for k, v in _flat(dump_config(config)).items()}
        new = [self._entities.Param(k, v) for k, v in values.items() if k not in known]
        for start in range(0, len(new), 100):  # a request takes 100 of them
            part = new[start : start + 100]
            self._client.log_batch(self.run_id, params=part, synchronous=True)

    def log_long_text(self, key: str, text: str) -> None:
        self._client.log_text(self.run_id, text, f"{key}.txt")

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


class NeptuneLogger(Logger):
    """Always refused: Neptune's service ended in March 2026.

    Raises:
        ConfigurationError: always.
    """

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        neptune_name: str | None = None,
    ) -> None:
        raise ConfigurationError(
            "Neptune's service ended on 5 March 2026; use trackers=wandb, trackio, tensorboard or "
            "mlflow"
        )

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None: ...


def split_metrics(metrics: Metrics) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the metrics that are numbers, and the others as text."""
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            texts[name] = str(value)
    return numbers, texts


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return found
