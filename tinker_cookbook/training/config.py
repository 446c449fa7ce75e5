"""Settings that every training loop has, and the checks they pass before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.engine.model.resolve import (
    check_rank,
    hidden_size,
    model_config,
    resolve_model,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import check_renderer_name
from tinker_cookbook.training.lr_scheduling import LRSchedule, compute_schedule_lr_multiplier
from tinker_cookbook.utils.run_folder.paths import check_tinker_path

if TYPE_CHECKING:
    from tinker import types

DEFAULT_TTL_SECONDS = 604800


@chz.chz
class RunSettings:
    """Settings that mean the same in every recipe, which takes them over with their defaults."""

    load_checkpoint_path: str | None = chz.field(
        default=None, doc="tinker:// path of weights to start from, with a fresh optimizer"
    )

    lr_schedule: LRSchedule = chz.field(default="linear", doc="linear, cosine or constant")
    warmup_steps: int = chz.field(default=0, doc="Steps over which the learning rate rises")
    num_epochs: int = chz.field(default=1, doc="Passes over the training data")
    max_steps: int | None = chz.field(
        default=None, doc="Steps of the run, instead of num_epochs; 0: only evaluate"
    )
    adam_beta1: float = chz.field(default=0.9, doc="Decay of the first moment")
    adam_beta2: float = chz.field(default=0.95, doc="Decay of the second moment")
    adam_eps: float = chz.field(default=1e-8, doc="Added to the denominator of the update")
    weight_decay: float = chz.field(default=0.0, doc="Decoupled weight decay")
    grad_clip_norm: float = chz.field(default=0.0, doc="Largest gradient norm; 0 is no clipping")
    seed: int = chz.field(default=0, doc="Seed of the adapter's start and of the data order")

    lora_rank: int = chz.field(default=32, doc="Rank of the LoRA adapter")
    train_attn: bool = chz.field(default=True, doc="Adapters on the attention layers")
    train_mlp: bool = chz.field(default=True, doc="Adapters on the MLP layers")
    train_unembed: bool = chz.field(default=True, doc="An adapter on the unembedding layer")

    allow_config_change: bool = chz.field(
        default=False, doc="Continue a run although settings changed that decide what a step means"
    )

    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    base_url: str | None = chz.field(default=None, doc="URL of a Tinker server")
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu (local engine)")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16 (local engine)")

    save_every: int = chz.field(default=20, doc="Steps between checkpoints; 0 is never")
    save_every_tokens: int = chz.field(default=0, doc="Trained tokens between checkpoints")
    save_every_seconds: float = chz.field(default=0, doc="Seconds between checkpoints")
    rolling_save_every: int = chz.field(
        default=0, doc="Steps between rolling checkpoints, of which only the newest is kept"
    )
    rolling_ttl_seconds: int | None = chz.field(default=7200, doc="Lifetime of rolling ones")
    ttl_seconds: int | None = chz.field(
        default=DEFAULT_TTL_SECONDS, doc="Lifetime of periodic checkpoints; the final one stays"
    )
    eval_every: int = chz.field(default=10, doc="Steps between evaluations; 0 is never")
    infrequent_eval_every: int = chz.field(default=100, doc="Steps between costly evaluations")

    wandb_project: str | None = chz.field(default=None, doc="Also log to Weights & Biases")
    wandb_name: str | None = chz.field(default=None, doc="Name of the run there")
    session_name: str | None = chz.field(default=None, doc="Name of the run at the backend")
    enable_trace: bool = chz.field(
        default=False, doc="Write what the run spends its time on to log_path/trace_events.jsonl"
    )
    span_chart_every: int = chz.field(
        default=0, doc="Steps between charts of that (iteration_NNNNNN/timing_gantt.html); 0: none"
    )

    def shared(self) -> dict[str, Any]:
        """These settings by name, to hand on to another config that has them."""
        return {name: getattr(self, name) for name in chz.chz_fields(RunSettings)}


def check_model(settings: Any) -> None:
    """Finds the model before settings are derived from it; a small part of it is fetched.

    ``settings`` has ``model_name``, ``backend``, ``base_url``, ``device`` and ``dtype``.

    Raises:
        ModelNotFoundError: The local engine would not find it; says where was looked. A remote
            backend knows its models itself.
    """
    kind, _, _ = check_backend(settings.backend, settings.base_url, settings.device, settings.dtype)
    if kind == "local":
        found = resolve_model(settings.model_name, need="tokenizer")
        width = hidden_size(model_config(found.folder))
        if width is not None and hasattr(settings, "lora_rank"):
            check_rank(settings.lora_rank, width, "lora_rank")


def check_settings(settings: Any) -> None:
    """Raises ``ConfigurationError`` for the first setting that cannot work.

    ``settings`` has ``backend``, ``base_url``, ``device``, ``dtype`` and ``renderer_name``; of the
    numeric ones those are checked that it has, so a loop with few knobs can use this too.
    """
    check_backend(settings.backend, settings.base_url, settings.device, settings.dtype)
    for bound in _BOUNDS:
        if hasattr(settings, bound.name):
            bound.check(getattr(settings, bound.name))
    if settings.renderer_name is not None:
        check_renderer_name(settings.renderer_name)


@chz.chz
class TrainingConfig(RunSettings):
    """Common settings of a training run; each loop adds its own."""

    log_path: str = chz.field(doc="Folder of this run: metrics, config, checkpoint list")
    model_name: str = chz.field(doc="Hub name or local folder of the base model")
    recipe_name: str = chz.field(default="", doc="Name of the recipe, kept with the run")
    renderer_name: str | None = chz.field(
        default=None, doc="SavedSoftmax with the run's checkpoints"
    )
    learning_rate: float = chz.field(default=1e-4, doc="Peak learning rate of AdamW")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first setting that cannot work."""
        check_settings(self)
        if self.max_steps == 0 and not (self.eval_every or self.infrequent_eval_every):
            raise ConfigurationError(
                "max_steps=0 evaluates without training, but eval_every=0 and "
                "infrequent_eval_every=0 switch evaluations off; set eval_every=1, or max_steps to "
                "at least 1"
            )
        check_tinker_path(
            "load_checkpoint_path",
            self.load_checkpoint_path,
            "weights",
            "the run that saved the weights",
        )
        compute_schedule_lr_multiplier(self.lr_schedule, 0, 1, 0)

    def adam_params(self, step: int, total_steps: int) -> types.AdamParams:
        """Optimizer settings of the update that follows ``step`` finished ones."""
        from tinker import types

        multiplier = compute_schedule_lr_multiplier(
            self.lr_schedule, step, total_steps, self.warmup_steps
        )
        return types.AdamParams(
            learning_rate=self.learning_rate * multiplier,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            eps=self.adam_eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )


@dataclass(frozen=True)
class _Bound:
    """Smallest value of a numeric setting, and for some the one it must stay below."""

    name: str
    low: float
    below: float = float("inf")
    none_allowed: bool = False
    hint: str = ""

    def check(self, value: Any) -> None:
        if value is None:
            fits = self.none_allowed
        else:
            fits = self.low <= value < self.below  # false for NaN as well
        if not fits:
            expected = f"at least {self.low:g}"
            if self.below != float("inf"):
                expected += f" and less than {self.below:g}"
            raise ConfigurationError(f"{self.name}: got {value}, expected {expected}{self.hint}")


_BOUNDS = (
    # One step of AdamW moves a weight by about the learning rate, so 10 ends every model.
    _Bound("learning_rate", 0, 10, hint="; 1e-5 to 1e-3 is usual, get_lr(model_name) recommends"),
    _Bound("batch_size", 1),
    _Bound("warmup_steps", 0),
    _Bound("num_epochs", 1),
    _Bound("max_steps", 0, none_allowed=True),
    _Bound("adam_beta1", 0, 1),
    _Bound("adam_beta2", 0, 1),
    _Bound("adam_eps", 0),
    _Bound("weight_decay", 0),
    _Bound("grad_clip_norm", 0),
    _Bound("lora_rank", 1),
    _Bound("save_every", 0),
    _Bound("save_every_tokens", 0),
    _Bound("save_every_seconds", 0),
    _Bound("rolling_save_every", 0),
    _Bound("rolling_ttl_seconds", 1, none_allowed=True),
    _Bound("ttl_seconds", 1, none_allowed=True),
    _Bound("eval_every", 0),
    _Bound("infrequent_eval_every", 0),
    _Bound("span_chart_every", 0),
)
