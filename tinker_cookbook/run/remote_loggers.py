"""Logs to Weights & Biases, Neptune and Trackio."""

# ruff: noqa: D102 (the methods are described in ``Logger``)

from __future__ import annotations

import html
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import dump_config
from tinker_cookbook.run.loggers import Logger, Metrics
from tinker_cookbook.run.paths import write_atomically

RUN_FILE = "wandb_run.json"


class WandbLogger(Logger):
    """A run of Weights & Biases, continued when its log folder is resumed.

    The run's id is kept in ``log_path/wandb_run.json``. Metrics are plotted over their own
    ``step``, not over the number of calls: a resumed run repeats steps that were logged before it
    was killed, and Weights & Biases drops rows whose call count decreases.

    Args:
        project: Project of the run.
        config: Its configuration.
        log_dir: The run's folder, where the logger of a resumed run finds its id. ``None``: every
            logger starts a new run.
        wandb_name: Its display name.

    Raises:
        ConfigurationError: wandb is not installed, or it has no key and no terminal to request one.
    """

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        wandb_name: str | None = None,
    ) -> None:
        self._wandb = wandb = _installed("wandb", "wandb")
        file = None if log_dir is None else Path(log_dir) / RUN_FILE
        known = json.loads(file.read_bytes())["id"] if file and file.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=wandb_name,
                dir=None if log_dir is None else os.fspath(log_dir),
                config=None if config is None else dump_config(config),
                id=known,
                resume="allow" if known else None,
            )
        except wandb.Error as error:
            raise ConfigurationError(
                f"Weights & Biases cannot start (wandb_project={project}): {error}; run `wandb "
                f"login`, set WANDB_MODE=offline, or leave wandb_project out"
            ) from error
        # Plots over our own step: see the docstring of the class.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if file is not None:
            # Written at the start, so that a run that is killed can be continued there.
            record = {"id": self._run.id, "project": project, "name": wandb_name}
            write_atomically(file, json.dumps(record).encode() + b"\n")

    @property
    def run_id(self) -> str:
        """The id under which the run can be resumed."""
        return self._run.id

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        self._run.log(dict(metrics) if step is None else {"step": step, **metrics})

    def log_hparams(self, config: Any) -> None:
        # A resumed run may have other settings.
        self._run.config.update(dump_config(config), allow_val_change=True)

    def log_long_text(self, key: str, text: str) -> None:
        self._run.log({key: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        self._run.finish()

    def get_logger_url(self) -> str | None:
        return self._run.url


class NeptuneLogger(Logger):
    """A run of Neptune; rows without a step are not sent.

    Args:
        project: ``WORKSPACE/PROJECT``.
        config: The run's configuration.
        log_dir: Folder of Neptune's files.
        neptune_name: Name of the experiment.

    Raises:
        ConfigurationError: neptune-scale is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        neptune_name: str | None = None,
    ) -> None:
        neptune = _installed("neptune_scale", "neptune-scale")
        self.run = neptune.Run(
            project=project,
            log_directory=None if log_dir is None else os.fspath(log_dir),
            experiment_name=neptune_name,
        )
        if config is not None:
            self.log_hparams(config)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        if step is not None:
            self.run.log_metrics(dict(metrics), step=step)

    def log_summary(self, metrics: Metrics) -> None:
        self.run.log_configs(dict(metrics))

    def log_hparams(self, config: Any) -> None:
        self.run.log_configs(dump_config(config), flatten=True, cast_unsupported=True)

    def close(self) -> None:
        self.run.close()

    def get_logger_url(self) -> str | None:
        return self.run.get_run_url()


class TrackioLogger(Logger):
    """A run of Trackio.

    Args:
        project: Its project.
        config: The run's configuration; Trackio takes it only here.
        log_dir: Not used: Trackio has its own folder.
        trackio_name: Name of the run.

    Raises:
        ConfigurationError: trackio is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        trackio_name: str | None = None,
    ) -> None:
        trackio = _installed("trackio", "trackio")
        self.run = trackio.init(
            project=project or "default",
            name=trackio_name,
            config=None if config is None else dump_config(config),
        )

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


def _installed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{error}; run: pip install {package}") from error
