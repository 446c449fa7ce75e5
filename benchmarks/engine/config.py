"""Settings of the benchmarks and their checks."""

from __future__ import annotations

from pathlib import Path

import chz

from benchmarks.harness import check_choices, check_least, check_output
from tinker_cookbook.exceptions import ConfigurationError

REFERENCES = ("plain", "stock", "trl", "before")
VARIANTS = ("engine", *REFERENCES)
SAMPLERS = ("engine", "before", "llama.cpp", "generate")
CASES = ("decode", "mixed", "group")
PREFIX_CASES = ("shared", "distinct")

_BEFORE = "Folder of an earlier commit of this project, which the variant before measures"
_WORK = "training, sampling, shared_prefix or vision; each has its settings: work=sampling --help"


@chz.chz
class Settings:
    """Settings of every benchmark."""

    model: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        doc="Hub name, local folder, or random weights of a true shape: shape:qwen3-0.6b, "
        "shape:qwen3-4b, shape:qwen3-8b, shape:tiny",
    )
    dtype: str = chz.field(default="auto", doc="float32, bfloat16 or auto")
    device: str = chz.field(default="auto", doc="auto, cuda, cuda:N, mps or cpu")
    repeats: int = chz.field(default=2, doc="Number of runs of each variant, in the order A B A B")
    rank: int = chz.field(default=32, doc="Rank of the LoRA adapter, on all linear layers")
    seed: int = chz.field(default=0, doc="Seed of adapter, random data and the order of rows")
    output: str | None = chz.field(default=None, doc="Also write the JSON object to this file")


@chz.chz
class Config(Settings):
    """Settings of the training benchmark."""

    work: str = chz.field(default="training", doc=_WORK)
    data: str = chz.field(
        default="random:40-400",
        doc="JSONL file of {messages} or {question, answer} rows, or random:MIN-MAX tokens",
    )
    batch_size: int = chz.field(default=8, doc="Conversations per step")
    steps: int = chz.field(default=4, doc="Timed steps of a repeat")
    warmup: int = chz.field(default=1, doc="Warm-up steps, which are not timed")
    variants: tuple[str, ...] = chz.field(
        default=("engine", "plain"),
        doc="Which run, in this order: engine, plain (transformers + peft), stock (plain without "
        "the process settings of this package), trl (SFTTrainer, with Liger's kernels on CUDA), "
        "before (the engine of another commit)",
    )
    before: str | None = chz.field(default=None, doc=_BEFORE)
    train_unembed: bool = chz.field(
        default=True, doc="The adapter covers the unembedding layer too; trl cannot"
    )
    trl_python: str | None = chz.field(
        default=None, doc="A Python with trl and the dependencies of this package; default: this"
    )
    trl_batch_size: int = chz.field(
        default=1, doc="trl: conversations in memory at once, of the batch_size of a step"
    )
    trl_gradient_checkpointing: bool = chz.field(
        default=False, doc="trl: recompute all layers; its own default is true"
    )
    max_length: int | None = chz.field(
        default=None, doc="Tokens after which conversations are cut; default: the model's context"
    )

    @property
    def conversations_needed(self) -> int:
        """Conversations a repeat uses; every step has its own."""
        return self.batch_size * (self.warmup + self.steps)


@chz.chz
class SamplingConfig(Settings):
    """Settings of the sampling benchmark."""

    work: str = chz.field(default="sampling", doc=_WORK)
    dtype: str = chz.field(default="auto", doc="float32, bfloat16, auto; several: a table each")
    cases: tuple[str, ...] = chz.field(
        default=CASES,
        doc="decode (steps of some sequences), mixed (many requests of mixed lengths), group (many "
        "samples of few prompts)",
    )
    variants: tuple[str, ...] = chz.field(
        default=("engine", "llama.cpp", "generate"),
        doc="Variants to run, in this order: engine, before (the engine of another commit), "
        "llama.cpp (in decode; needs the extra llama-cpp), generate (of transformers)",
    )
    before: str | None = chz.field(default=None, doc=_BEFORE)
    seconds: float = chz.field(
        default=8.0,
        doc="Time for the steps of a case, after its prompts. In decode each variant takes as many "
        "steps as fit. In mixed and group generate stops, and the rest is estimated",
    )
    decode_rows: tuple[int, ...] = chz.field(default=(1, 8, 64), doc="decode: sequences in a step")
    decode_prompt_tokens: int = chz.field(default=64, doc="decode: tokens of a prompt")
    decode_answer_tokens: int = chz.field(default=106, doc="decode: most tokens of an answer")
    mixed_requests: int = chz.field(default=64, doc="mixed: requests of one sample each")
    mixed_shortest: int = chz.field(default=16, doc="mixed: least tokens of a prompt, an answer")
    mixed_longest: int = chz.field(default=256, doc="mixed: most tokens of a prompt, an answer")
    group_prompts: int = chz.field(default=8, doc="group: prompts")
    group_samples: int = chz.field(default=16, doc="group: samples of each prompt")
    group_prompt_tokens: int = chz.field(default=200, doc="group: tokens of a prompt")
    group_answer_tokens: int = chz.field(default=64, doc="group: tokens of an answer")
    batch_size: int = chz.field(default=64, doc="Samples in a static batch of generate")


@chz.chz
class SharedPrefixConfig(Settings):
    """Settings of the benchmark of training on groups that share their prompt."""

    work: str = chz.field(default="shared_prefix", doc=_WORK)
    cases: tuple[str, ...] = chz.field(
        default=PREFIX_CASES, doc="shared (groups of one prompt), distinct (nothing in common)"
    )
    groups: int = chz.field(default=8, doc="shared: prompts")
    group_size: int = chz.field(default=16, doc="shared: sequences of each prompt")
    distinct: int = chz.field(default=32, doc="distinct: sequences")
    prompt_tokens: int = chz.field(default=200, doc="Tokens of a prompt, none of them trained")
    answer_tokens: int = chz.field(default=64, doc="Tokens of an answer, all of them trained")
    steps: int = chz.field(default=1, doc="Timed steps of a repeat, all on the same batch")


@chz.chz
class VisionConfig(Settings):
    """Settings of the benchmark of training and sampling with images."""

    work: str = chz.field(default="vision", doc=_WORK)
    model: str = chz.field(
        default="shape:qwen3-vl-0.2b",
        doc="Hub name or folder of a Qwen3-VL, or random weights: shape:qwen3-vl-0.2b, "
        "shape:tiny-vl",
    )
    rows: int = chz.field(default=4, doc="Rows of a training step, each with an image of its own")
    samples: int = chz.field(default=8, doc="Answers to one prompt, sampled or trained")
    prompt_tokens: int = chz.field(default=32, doc="Text tokens of a prompt")
    answer_tokens: int = chz.field(default=64, doc="Most tokens of an answer; an eighth: least")
    image_side: int = chz.field(default=384, doc="Pixels of an image's side; or two thirds of it")
    plain_gradient_checkpointing: bool = chz.field(
        default=False, doc="plain: recompute all layers, as TRL does by default"
    )


def check_config(config: Config) -> None:
    """Raises ``ConfigurationError`` for settings that are wrong whatever the model is."""
    _check_common(config)
    check_least(config, {"batch_size": 1, "steps": 1, "warmup": 1})
    if config.max_length is not None:
        check_least(config, {"max_length": 2})
    check_choices("variants", config.variants, VARIANTS)
    _check_before(config)
    if "trl" not in config.variants:
        return
    if config.train_unembed:
        raise ConfigurationError(
            "train_unembed: got true, but trl trains no unembedding layer; set train_unembed=false"
        )
    if config.trl_batch_size < 1 or config.batch_size % config.trl_batch_size:
        raise ConfigurationError(
            f"trl_batch_size: got {config.trl_batch_size}, expected a divisor of batch_size = "
            f"{config.batch_size}"
        )


def check_sampling_config(config: SamplingConfig) -> None:
    """Raises ``ConfigurationError`` for settings that are wrong whatever the model is."""
    _check_common(config)
    sizes = [name for name in chz.chz_fields(SamplingConfig) if name.startswith(_SIZES)]
    check_least(config, dict.fromkeys(sizes, 1) | {"decode_answer_tokens": 4})
    if config.mixed_longest < config.mixed_shortest:
        raise ConfigurationError(
            f"mixed_longest: got {config.mixed_longest}, expected at least mixed_shortest = "
            f"{config.mixed_shortest}"
        )
    check_choices("variants", config.variants, SAMPLERS)
    check_choices("cases", config.cases, CASES)
    _check_before(config)
    if config.seconds <= 0 or not config.decode_rows or min(config.decode_rows) < 1:
        name = "seconds" if config.seconds <= 0 else "decode_rows"
        raise ConfigurationError(f"{name}: got {getattr(config, name)}, expected more than 0")


def _check_before(config: Config | SamplingConfig) -> None:
    """The folder is given exactly if its variant is."""
    folder = None if config.before is None else Path(config.before).expanduser()
    fits = folder is None or (folder / "tinker_cookbook").is_dir()
    if not fits or (folder is None) == ("before" in config.variants):
        raise ConfigurationError(
            f"before: got {config.before!r} and variants={','.join(config.variants)}, expected the "
            "variant before and a folder with tinker_cookbook/ (git worktree add makes one), or "
            "neither"
        )


_SIZES = ("mixed_", "group_", "decode_prompt", "decode_answer", "batch_")


def check_shared_prefix_config(config: SharedPrefixConfig) -> None:
    """Raises ``ConfigurationError`` for settings that are wrong whatever the model is."""
    _check_common(config)
    names = ("groups", "group_size", "distinct", "prompt_tokens", "answer_tokens", "steps")
    check_least(config, dict.fromkeys(names, 1))
    check_choices("cases", config.cases, PREFIX_CASES)


def check_vision_config(config: VisionConfig) -> None:
    """Raises ``ConfigurationError`` for settings that are wrong whatever the model is."""
    _check_common(config)
    check_least(config, {"rows": 1, "samples": 1, "prompt_tokens": 8, "answer_tokens": 8})
    check_least(config, {"image_side": 32})


def _check_common(config: Settings) -> None:
    check_least(config, {"repeats": 1, "rank": 1})
    check_output(config.output)
