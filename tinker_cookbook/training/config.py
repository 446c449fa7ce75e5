"""Common settings of all training loops, and their validation before anything is loaded."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

import chz
from chz.field import Field

from tinker_cookbook import cli_utils, hyperparam_utils, model_info
from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.backends.engine_options import EngineSettings
from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.engine.model.resolve import (
    check_rank,
    hidden_size,
    model_config,
    resolve_model,
)
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.schema import RecordLevel
from tinker_cookbook.renderers import check_renderer_name
from tinker_cookbook.run.best import MetricMode, check_best_settings
from tinker_cookbook.run.trackers import TrackerName
from tinker_cookbook.run.weights_paths import check_tinker_path, weights_field
from tinker_cookbook.training.lr_scheduling import LRSchedule, compute_schedule_lr_multiplier
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.utils.imports import tinker

C = TypeVar("C", bound="TrainingConfig")

DEFAULT_TTL_SECONDS = 604800
# Metadata of a field that a config needs, except that of a recipe, which derives it.
REQUIRED = {"required": True}


def at_least(low: float, below: float = math.inf, hint: str = "") -> Callable[[Any, str], None]:
    """Returns a validator for ``low <= value < below``; None passes, NaN fails."""

    def check(settings: Any, attribute: str) -> None:
        value = getattr(settings, attribute)
        # Comparisons with NaN are false, so NaN fails.
        if value is not None and not low <= value < below:
            name = attribute.removeprefix("X_")  # chz validates the raw attribute
            upper = "" if below == math.inf else f" and less than {below:g}"
            raise ConfigurationError(f"{name}: got {value}, expected at least {low:g}{upper}{hint}")

    return check


def setting(default: Any, doc: str) -> Any:
    """Returns a chz field."""
    return chz.field(default=default, doc=doc)


def number(default: Any, doc: str, low: float = 0, below: float = math.inf) -> Any:
    """Returns a numeric chz field with the bounds of ``at_least``."""
    return chz.field(default=default, validator=at_least(low, below), doc=doc)


def peak_rate(default: float | None, doc: str = "Peak learning rate of AdamW") -> Any:
    """Returns a chz field for a learning rate, with bounds."""
    # An AdamW step moves a weight by about the learning rate, so 10 destroys any model.
    hint = "; 1e-5 to 1e-3 is usual, get_lr(model_name) recommends"
    return chz.field(default=default, validator=at_least(0, 10, hint), doc=doc)


@chz.chz
class BackendSettings:
    """Settings that choose a backend."""

    backend: str = setting("auto", "auto, local, tinker, or the URL of a server")
    base_url: str | None = setting(None, "URL of a Tinker server")
    device: str = setting("auto", "auto, cuda, mps or cpu (local engine)")
    dtype: str = setting("auto", "auto, float32 or bfloat16 (local engine)")
    base_dtype: str = setting("auto", "auto, nf4 or int8: quantise the base model (local engine)")


def check_model(settings: Any) -> None:
    """Raises ModelNotFoundError if the local engine would not find the model.

    Downloads only a small part of it. Remote backends check models themselves.
    """
    kind, _, _ = check_backend(settings.backend, settings.base_url, settings.device, settings.dtype)
    if kind != "local" and getattr(settings, "lora_rank", None) == 0:
        raise ConfigurationError(
            "lora_rank: got 0, which trains all weights; only the local engine can. Set "
            "backend=local, or lora_rank=32"
        )
    if kind == "local":
        found = resolve_model(settings.model_name, need="tokenizer")
        width = hidden_size(model_config(found.folder))
        if width is not None and hasattr(settings, "lora_rank"):
            check_rank(settings.lora_rank, width, "lora_rank")


def check_settings(settings: Any) -> None:
    """Raises ``ConfigurationError`` for a backend or chat format that does not exist."""
    kind, _, _ = check_backend(settings.backend, settings.base_url, settings.device, settings.dtype)
    EngineSettings.of(settings).check(local=kind == "local")
    SamplerSettings.of(settings).check(local=kind == "local")
    if settings.renderer_name is not None:
        check_renderer_name(settings.renderer_name)


@chz.chz
class TrainingConfig(BackendSettings, SamplerOptions):
    """Settings of a run in every training loop; each loop adds its own.

    A *recipe* is a subclass that defines ``build_dataset``. It adds settings of its own, and gives
    a setting another default in one line (``group_size: int = 4``), which keeps bounds and meaning.
    Values that are None or "auto" follow from the model; ``resolved`` fills them in.
    """

    log_path: str = chz.field(
        default="",
        doc="Folder of this run: metrics, config, checkpoint list; default of a recipe: "
        f"{cli_utils.default_log_path('RECIPE')}",
        metadata=REQUIRED,
    )
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior | None = setting(
        None, "ask, resume, delete or raise; None: resume"
    )
    model_name: str = chz.field(doc="Hub name or local folder of the base model")
    recipe_name: str = setting("", "Name of the recipe, stored with the run")
    renderer_name: str | None = setting(
        None, "Chat format, saved with the run's checkpoints; default of a recipe: the model's"
    )

    shard_base: bool = setting(
        False,
        "Divide the base model among the processes of torchrun, for one that fits no single "
        "GPU (local engine)",
    )
    server_wait: float = number(
        0,
        "Seconds to wait for a server that has restarted; the run then continues from its last "
        "checkpoint. 0: the run ends",
    )
    load_checkpoint_path: str | None = weights_field(
        "weights", "Weights to start from, with a fresh optimizer"
    )

    learning_rate: float | None = peak_rate(
        1e-4,
        "Peak learning rate of AdamW; None: the recommended rate for the model (RL: a quarter of "
        "it, DPO: a tenth)",
    )
    lr_schedule: LRSchedule = setting("linear", "linear, cosine or constant")
    warmup_steps: int = number(0, "Warm-up steps, over which the learning rate rises")
    num_epochs: int = number(1, "Passes over the training data", low=1)
    max_steps: int | None = number(None, "Number of steps, overrides num_epochs; 0: only evaluate")
    adam_beta1: float = number(0.9, "Decay rate of the first moment", below=1)
    adam_beta2: float = number(0.95, "Decay rate of the second moment", below=1)
    adam_eps: float = number(1e-8, "Added to the denominator of the update")
    weight_decay: float = number(0.0, "Decoupled weight decay")
    grad_clip_norm: float = number(0.0, "Maximum gradient norm; 0: no clipping")
    seed: int = setting(0, "Seed of the adapter's initialisation and of the data order")

    lora_rank: int = number(32, "Rank of the LoRA adapter; 0: train all weights (local)")
    train_attn: bool = setting(True, "Adapters on the attention layers")
    train_mlp: bool = setting(True, "Adapters on the MLP layers")
    train_unembed: bool = setting(True, "An adapter on the unembedding layer")
    train_vision: bool = setting(
        False, "Adapters on the vision tower and its connector (backend=local)"
    )

    allow_config_change: bool = setting(
        False, "Continue a run although settings changed that affect training steps"
    )

    save_every: int | None = number(
        20, "Steps between checkpoints; 0: never; None: 15, or a 20th of a longer run"
    )
    save_every_tokens: int = number(0, "Trained tokens between checkpoints")
    save_every_seconds: float = number(0, "Seconds between checkpoints")
    rolling_save_every: int = number(
        0, "Steps between rolling checkpoints; only the newest is kept"
    )
    rolling_ttl_seconds: int | None = number(
        7200, "Lifetime of rolling checkpoints in seconds", low=1
    )
    ttl_seconds: int | None = number(
        DEFAULT_TTL_SECONDS,
        "Lifetime of periodic checkpoints in seconds; the final one is kept",
        low=1,
    )
    eval_every: int = number(10, "Steps between evaluations; 0: never")
    infrequent_eval_every: int = number(100, "Steps between expensive evaluations")

    best_metric: str | None = setting(
        None, "Keep the best checkpoint by this evaluation metric, such as test/nll"
    )
    best_metric_mode: MetricMode | None = setting(
        None, "min or max; default: min for losses, else max"
    )
    early_stopping_patience: int = number(
        0, "Evaluations without improvement of best_metric until the run stops; 0: never"
    )

    record: RecordLevel = setting(
        "full",
        "What log_path/record keeps of each step, for view, replay and fork: full (also tokens "
        "and their log-probabilities), summary or off",
    )
    trackers: list[TrackerName] | None = setting(
        None,
        "Also log to these: wandb, trackio, tensorboard, mlflow (trackers=wandb,tensorboard); "
        "default: wandb if wandb_project is given",
    )
    wandb_project: str | None = setting(None, "Project of the run in its trackers")
    wandb_name: str | None = setting(
        None, "Name of the run in its trackers; default: the name of its folder"
    )
    session_name: str | None = setting(None, "Name of the run in the backend")
    enable_trace: bool = setting(
        False, "Write a time trace of the run to log_path/trace_events.jsonl"
    )
    span_chart_every: int = number(
        0, "Steps between files with the timeline of a step, which view shows of each; 0: none"
    )

    recipe_defaults: ClassVar[dict[str, Any]] = {"behavior_if_log_dir_exists": "ask"}
    """Defaults of recipes where they differ from those of a config in a user's code."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        known: dict[str, Field] = {}
        for base in reversed(cls.__mro__[1:]):
            known |= getattr(base, "__chz_fields__", {})
        types = inspect.get_annotations(cls)
        if cls.is_recipe() and not any(
            issubclass(base, TrainingConfig) and base.is_recipe() for base in cls.__mro__[1:]
        ):
            for name, value in cls.recipe_defaults.items():
                if name not in types:
                    types[name] = known[name].final_type
                    setattr(cls, name, value)
        cls.__annotations__ = types
        # Another default alone; chz would drop the rest of the field.
        for name in types.keys() & known.keys() & vars(cls).keys():
            value, old = vars(cls)[name], known[name]
            if not isinstance(value, Field):
                field = chz.field(
                    default=value,
                    doc=old._doc,
                    validator=[*old._validator],
                    munger=old._munger,
                    metadata=old.metadata,
                )
                setattr(cls, name, field)

    def build_dataset(self) -> Any:
        """Builds the data of a recipe from its own settings, for ``dataset_builder``."""
        raise NotImplementedError

    def values_of(self, kind: type[Any]) -> dict[str, Any]:
        """Returns the fields of a settings class that these settings include."""
        return {name: getattr(self, name) for name in chz.chz_fields(kind)}

    @classmethod
    def is_recipe(cls) -> bool:
        """Returns whether the class builds its data itself."""
        return cls.build_dataset is not TrainingConfig.build_dataset

    @property
    def renderer(self) -> str:
        """Chat format: the setting, or the model's default."""
        return model_info.resolve_renderer_name(
            self.model_name, self.renderer_name, self.log_path or None
        )[0]

    @property
    def run_path(self) -> str:
        """Folder of the run: the setting, or the recipe's default."""
        return self.log_path or cli_utils.default_log_path(self.recipe_name)

    @property
    def rate(self) -> float:
        """Peak learning rate: the setting, or the model's recommended one."""
        return self.recommended_rate() if self.learning_rate is None else self.learning_rate

    def recommended_rate(self) -> float:
        """Returns the learning rate of a run without a configured one."""
        return hyperparam_utils.get_lr(self.model_name, is_lora=self.lora_rank > 0)

    def for_loop(self, loop: type[C], recipe_name: str, **values: Any) -> C:
        """Returns the config of one of the loops that a program runs, with the settings of all."""
        given = self.values_of(TrainingConfig)
        given |= {"recipe_name": recipe_name, "renderer_name": self.renderer}
        given["behavior_if_log_dir_exists"] = None
        return loop(**given | values)

    def resolved(self) -> TrainingConfig:
        """Returns the config with all values that follow from others, as the loop trains with it.

        The result is of the loop's own class: the settings of a recipe have become its dataset.

        Raises:
            ConfigurationError: Settings contradict each other.
            ModelNotFoundError: There is no such model; only the local engine finds that here.
        """
        raise NotImplementedError

    def _filled(self, loop: type[C], data: str, **derived: Any) -> C:
        """Returns the config of a loop, whose field ``data`` has the data; ``derived`` are the
        values that the loop derives."""
        derived["behavior_if_log_dir_exists"] = None
        if self.is_recipe() or self.learning_rate is None:
            check_model(self)
        derived["learning_rate"] = self.rate
        if not self.is_recipe():
            for name, field in chz.chz_fields(self).items():
                if field.metadata == REQUIRED and not getattr(self, name):
                    raise ConfigurationError(f"{name}: got no value, and it is required")
            return chz.replace(self, **derived)  # type: ignore[return-value]
        derived |= {"log_path": self.run_path, "renderer_name": self.renderer}
        given = self.values_of(loop)
        given[data] = given[data] or self.build_dataset()
        return loop(**given | derived)

    def check(self) -> None:
        """Raises ``ConfigurationError`` for invalid or conflicting settings."""
        check_settings(self)
        check_best_settings(self)
        check_tinker_path(
            "load_checkpoint_path",
            self.load_checkpoint_path,
            "weights",
            "the run that saved the weights",
        )
        # Raise for an unknown schedule now, not at the first update.
        compute_schedule_lr_multiplier(self.lr_schedule, 0, 1, 0)

    def server_needs(self) -> list[Need]:
        """Returns the server features that this run requires; each loop adds its own."""
        needs = [Need("loss:cross_entropy", "this loop")]
        if self.grad_clip_norm:
            setting = f"grad_clip_norm={self.grad_clip_norm:g}"
            needs.append(Need("adam:grad_clip_norm", setting, "set grad_clip_norm=0"))
        # Training all layers is the default, which a server may interpret in its own way.
        for name in ("train_attn", "train_mlp", "train_unembed"):
            if not getattr(self, name):
                needs.append(Need(f"lora:{name}", f"{name}=False", f"set {name}=True"))
        return needs

    def adam_params(self, step: int, total_steps: int) -> tinker.AdamParams:
        """Returns the optimizer settings of the 0-based update ``step``."""

        # The rate depends only on the step and the run's length, so a resumed run has the same.
        multiplier = compute_schedule_lr_multiplier(
            self.lr_schedule, step, total_steps, self.warmup_steps
        )
        return tinker.AdamParams(
            learning_rate=self.rate * multiplier,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            eps=self.adam_eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )


def checkpoint_interval(config: TrainingConfig, total_steps: int) -> int:
    """Returns ``save_every``, or by default an interval that does not fill the disk."""
    if config.save_every is not None:
        return config.save_every
    return max(15, math.ceil(total_steps / 20))


def recorded_renderer(config: TrainingConfig) -> str | None:
    """Returns the chat format of a run: its own setting, or that of its dataset builder."""
    builder = getattr(config, "dataset_builder", None)
    common = getattr(builder, "common_config", None)
    names = (getattr(one, "renderer_name", None) for one in (config, builder, common))
    return next((name for name in names if isinstance(name, str)), None)


@asynccontextmanager
async def prepared(config: C) -> AsyncIterator[C]:
    """Resolves and checks a config, then decides about its log folder, then runs the block.

    A wrong setting together with ``behavior_if_log_dir_exists="delete"`` deletes nothing; what
    fails later (the data, the backend, a checkpoint) brings the old run back.
    """
    behavior = config.behavior_if_log_dir_exists or "resume"
    # In a thread: it may read the Hub, or make data.
    ready: Any = await asyncio.to_thread(config.resolved)
    await asyncio.to_thread(ready.check)
    with cli_utils.log_dir_of_run(ready.log_path, behavior):
        yield ready
