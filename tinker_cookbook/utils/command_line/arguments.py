"""Parses ``key=value`` arguments into a config; errors name the nearest valid key."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import chz
from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.utils.command_line.help import print_help
from tinker_cookbook.utils.command_line.keys import (
    Key,
    aliases_of,
    choices_of,
    describe_type,
    keys_of,
    nested_class,
)
from tinker_cookbook.utils.command_line.programs import version_line

_LOG_PATH = ("log_path", "log_dir", "output_file")
_BATCH = ("batch_size", "groups_per_batch")
_STEPS = ("max_steps", "num_steps", "num_batches")
_DATA = ("dataset_path", "dataset", "file_path", "input_file", "dataset_builder")
_TRAINED = ("train_on_what",)
_GROUP = ("group_size", "samples_per_query", "rl_group_size")
_TOKENS = ("max_tokens", "rl_max_tokens", "answer_max_tokens")

# Names in other libraries, and the keys that they mean here: the first one that the program has.
_SYNONYMS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("lr", "learningrate", "peak_lr", "max_lr"): (
        "learning_rate",
        "sft_learning_rate",
    ),
    ("output_dir", "out_dir", "output", "out", "save_dir", "logging_dir", "logdir", "run_dir"): (
        _LOG_PATH
    ),
    ("log_dir", "results_dir", "checkpoint_dir"): _LOG_PATH,
    ("epochs", "n_epochs", "num_train_epochs", "epoch"): ("num_epochs",),
    ("batch", "batch_size", "bs", "per_device_train_batch_size", "train_batch_size"): _BATCH,
    ("per_device_batch_size", "global_batch_size", "groups_per_batch"): _BATCH,
    ("steps", "max_steps", "num_steps", "n_steps", "total_steps", "max_train_steps"): _STEPS,
    ("num_train_steps", "n_batches", "num_batches", "max_iters", "iters"): _STEPS,
    ("warmup", "num_warmup_steps", "lr_warmup_steps", "warmup_iters"): ("warmup_steps",),
    ("lr_scheduler_type", "lr_scheduler", "scheduler", "schedule"): ("lr_schedule",),
    ("adam_epsilon", "eps", "adam_epsilon_value"): ("adam_eps",),
    ("beta1", "adam_b1"): ("adam_beta1",),
    ("beta2", "adam_b2"): ("adam_beta2",),
    ("wd",): ("weight_decay",),
    ("max_grad_norm", "clip_grad_norm", "gradient_clip", "grad_clip", "clip_grad"): (
        "grad_clip_norm",
    ),
    ("rank", "r", "lora_r", "lora_dim"): ("lora_rank",),
    ("max_new_tokens", "max_completion_length", "max_response_length", "response_length"): _TOKENS,
    ("max_output_tokens", "new_tokens"): _TOKENS,
    ("num_generations", "n_samples", "num_samples", "samples_per_prompt", "n"): _GROUP,
    ("num_generations_per_prompt", "num_return_sequences", "rollouts", "g"): _GROUP,
    ("beta",): ("dpo_beta", "kl_penalty_coef"),
    ("kl_coef", "kl_beta", "kl_coeff", "init_kl_coef", "kl"): ("kl_penalty_coef",),
    ("model", "base_model", "model_path", "model_name_or_path", "model_id", "pretrained"): (
        "model_name",
        "base_model",
    ),
    ("policy_model", "student", "student_model", "checkpoint_model"): ("model_name",),
    ("teacher", "teacher_model_name", "teacher_name"): ("teacher_model", "teacher_path"),
    ("ref_model", "reference_model", "ref_model_name"): (
        "reference_model_name",
        "kl_reference_model",
    ),
    ("dataset", "data", "data_path", "train_file", "train_data", "training_file"): _DATA,
    ("dataset_name", "dataset_file", "train_path", "data_file", "file"): _DATA,
    ("eval_file", "validation_file", "test_file", "eval_dataset", "val_path"): ("test_path",),
    ("eval_size", "val_size", "validation_split", "val_set_size"): ("test_size", "test_fraction"),
    ("run_name", "experiment_name", "exp_name", "name"): ("wandb_name", "session_name"),
    ("report_to", "wandb", "project", "wandb_entity", "logger", "use_wandb"): ("wandb_project",),
    ("max_seq_length", "max_seq_len", "max_len", "seq_len", "cutoff_len", "block_size"): (
        "max_length",
    ),
    ("assistant_only_loss", "completion_only_loss", "train_on_inputs", "mask_history"): _TRAINED,
    ("group_size",): _GROUP,
    ("context_length", "model_max_length", "sequence_len"): ("max_length",),
    ("eval_steps", "eval_interval", "evaluation_steps", "eval_freq", "eval_strategy"): (
        "eval_every",
    ),
    ("save_steps", "save_interval", "checkpoint_every", "save_freq"): ("save_every",),
    ("random_seed", "data_seed"): ("seed",),
    ("temp", "sampling_temperature"): ("temperature",),
    ("renderer", "chat_template", "template", "prompt_template"): ("renderer_name",),
    ("environment", "env_name", "task", "task_name"): ("env", "dataset"),
    ("checkpoint", "checkpoint_path", "load_path", "init_from", "adapter_path"): (
        "load_checkpoint_path",
        "model_path",
    ),
    ("resume_from", "load_checkpoint", "adapter_name_or_path"): ("load_checkpoint_path",),
    ("url", "server", "api_base", "host"): ("base_url", "server"),
    ("loss", "algorithm", "algo", "loss_type"): ("loss_fn", "dpo_loss"),
    ("reward_scaling", "scale_rewards", "norm_adv", "normalize_advantages"): (
        "advantage_normalization",
    ),
}

# Names that mean a value of one of our keys, or no key at all: names, a key that the program must
# have for the hint to be true, hint.
_HINTS: dict[tuple[str, ...], tuple[str, str]] = {
    ("grpo", "use_grpo", "dapo", "dr_grpo", "rloo"): (
        "advantage_normalization",
        "GRPO is loss_fn=importance_sampling or ppo with advantage_normalization=std (center, the "
        "default, is Dr. GRPO; leave_one_out is RLOO)",
    ),
    ("bf16", "bfloat16", "use_bf16"): ("dtype", "set dtype=bfloat16"),
    ("fp16", "float16", "mixed_precision", "precision", "torch_dtype", "half"): (
        "dtype",
        "set dtype=bfloat16 or dtype=float32",
    ),
    ("gpu", "cuda", "use_cuda", "cpu", "use_cpu", "no_cuda"): (
        "device",
        "set device=auto, cuda, mps or cpu",
    ),
    ("gradient_accumulation_steps", "accumulation_steps", "grad_accum"): (
        "learning_rate",
        "a batch is split so that it fits into memory without a setting; batch_size or "
        "groups_per_batch is what one optimizer step trains on",
    ),
    ("micro_batch_size", "mini_batch_size", "per_device_eval_batch_size"): (
        "learning_rate",
        "a batch is split so that it fits into memory without a setting; batch_size or "
        "groups_per_batch is what one optimizer step trains on",
    ),
    ("gradient_checkpointing", "use_gradient_checkpointing"): (
        "learning_rate",
        "activations are recomputed where memory is short, without a setting",
    ),
    ("use_vllm", "vllm_mode", "use_vllm_server"): (
        "sampler",
        "the engine samples too; sampler=vllm uses vLLM on a GPU",
    ),
    ("epsilon", "epsilon_high", "clip_range", "cliprange", "clip_ratio"): (
        "loss_fn_config",
        "clipping belongs to a loss: loss_fn=ppo with "
        "loss_fn_config.clip_low_threshold=0.8 loss_fn_config.clip_high_threshold=1.2",
    ),
    ("max_prompt_length",): (
        "max_tokens",
        "prompts are never cut; max_tokens is the limit of a response",
    ),
    ("save_total_limit",): (
        "ttl_seconds",
        "periodic checkpoints expire after ttl_seconds; rolling_save_every keeps the newest only",
    ),
    ("adapter", "use_lora", "use_peft", "finetuning_type"): (
        "lora_rank",
        "training is always by LoRA; lora_rank is the setting",
    ),
    ("warmup_ratio",): ("warmup_steps", "set warmup_steps to a number of steps"),
    ("lora_alpha", "alpha", "lora_dropout"): (
        "lora_rank",
        "lora_alpha is fixed at 32 and there is no dropout, as on the Tinker API; lora_rank is "
        "the setting",
    ),
    ("target_modules", "lora_target_modules"): (
        "train_mlp",
        "set train_attn, train_mlp and train_unembed to True or False",
    ),
    ("packing", "pack", "sample_packing"): (
        "learning_rate",
        "sequences are packed without a setting",
    ),
    ("logging_steps", "log_every", "log_interval"): (
        "log_path",
        "every step is logged, to metrics.jsonl in log_path",
    ),
    ("resume", "resume_from_checkpoint", "continue"): (
        "behavior_if_log_dir_exists",
        "set behavior_if_log_dir_exists=resume and the log_path of the run",
    ),
    ("overwrite", "overwrite_output_dir", "force"): (
        "behavior_if_log_dir_exists",
        "set behavior_if_log_dir_exists=delete",
    ),
    ("optim", "optimizer"): ("adam_beta1", "the optimizer is AdamW; its settings are adam_…"),
    ("num_gpus", "nproc_per_node", "deepspeed", "fsdp"): (
        "shard_base",
        "start the command by torchrun --nproc-per-node N -m recipes.NAME to train on N GPUs; "
        "shard_base=true divides a base model that fits no single one",
    ),
    ("load_in_4bit", "load_in_8bit", "quantization_bit"): (
        "base_dtype",
        "set base_dtype=nf4 or base_dtype=int8",
    ),
}

_KEYS_OF_NAME = {name: keys for names, keys in _SYNONYMS.items() for name in names}
_HINT_OF_NAME = {name: hint for names, hint in _HINTS.items() for name in names}


def hint_for(name: str, known: Iterable[str]) -> str:
    """Returns what to use in place of an unknown key, as the end of a sentence, or ``""``.

    Args:
        name: What was typed; case, hyphens and underscores do not matter.
        known: The keys of the program. No other is ever suggested.
    """
    keys = set(known)
    typed = name.lower().replace("-", "_").strip("_")
    # By their last part, since the key may be of a nested object (dataset_builder.group_size). The
    # program's own keys are the shortest, so they replace those of nested objects.
    full = {key.rpartition(".")[2]: key for key in sorted(keys, key=len, reverse=True)}
    for key in _KEYS_OF_NAME.get(typed, ()):
        if key in full:
            return f"; did you mean {full[key]!r}?"
    needed, hint = _HINT_OF_NAME.get(typed, ("", ""))
    return f"; {hint}" if needed in keys else ""


SEE_HELP = " (--help lists the keys)"
HELP = ("--help", "-h")
VERSION = "--version"
# Parts of chz's messages.
_WRONG_VALUE = re.compile(r"argument '(?P<got>.*)' provided for param '(?P<key>[^']*)'")
_UNKNOWN_KEY = re.compile(r"Extraneous argument '(?P<key>[^']*)'")
_MISSING_KEYS = re.compile(r"Missing required arguments for parameter\(s\): (?P<keys>[\w., ]+)")
_NO_CLASS = "polymorphic construction:\n"


def parse_arguments(config_class: type[Any], arguments: Sequence[str]) -> Any:
    """Returns the config that ``key=value`` arguments (also ``--key=value``) describe.

    A nested object is chosen with ``name=module:Class`` and set with ``name.KEY=value``.

    Raises:
        ConfigurationError: An unknown or repeated key, a value of another type, or a required key
            that is missing.
        SystemExit: After ``--help`` or ``--version``.
    """
    # Before any check, so that help is printed for an incomplete or wrong command line as well.
    if any(argument in HELP for argument in arguments):
        pairs = (argument.removeprefix("--").partition("=") for argument in arguments)
        print_help(config_class, {name: value for name, equals, value in pairs if equals})
        sys.exit(0)
    if VERSION in arguments:
        print(version_line())
        sys.exit(0)
    given = _given(arguments, config_class)
    words = [f"{key}={value}" for key, value in given.items()]
    keys = {key.name: key for key in keys_of(config_class, given)}
    try:
        config = chz.Blueprint(config_class).make_from_argv(words, allow_hyphens=True)
    except (
        ConstructionException,
        ExtraneousBlueprintArg,
        InvalidBlueprintArg,
        MissingBlueprintArg,
    ) as error:
        raise ConfigurationError(_translate(str(error), keys, given)) from error
    # A base class without fields can be built from no keys at all, so chz misses nothing.
    if missing := _missing_classes(keys, given):
        raise ConfigurationError(_missing_message(missing, keys))
    return config


def _given(arguments: Sequence[str], config_class: type[Any]) -> dict[str, str]:
    """Returns the value of each key; raises for words that are not ``key=value`` and repeats."""
    aliases = aliases_of(config_class)
    given: dict[str, str] = {}
    written: dict[str, str] = {}
    for argument in arguments:
        if "=" not in argument:
            name = argument.lstrip("-")
            known = [key.name for key in keys_of(config_class)]
            if name in known:
                raise ConfigurationError(f"{name}: got no value, expected {name}=VALUE{SEE_HELP}")
            hint = hint_for(name, known) or nearest(name, known)
            raise ConfigurationError(
                f"command line: got {argument!r}, expected key=value{hint}{SEE_HELP}"
            )
        name, _, value = argument.partition("=")
        name = name.removeprefix("--")
        # By the field's name, so that a key and its alias count as one key given twice.
        key = aliases.get(name, name)
        if key in given:
            names = name if name == written[key] else f"{written[key]} and {name}"
            means = "" if name == written[key] else ", which mean the same key"
            raise ConfigurationError(
                f"{names}: got it twice{means}, with {given[key]!r} and {value!r}; "
                "expected it once: leave one out"
            )
        given[key], written[key] = value, name
    return given


def _translate(message: str, keys: Mapping[str, Key], given: Mapping[str, str]) -> str:
    """Converts chz's error to an error of this package if its kind is known."""
    # chz's errors have the key and the value only in their text.
    if unknown := _UNKNOWN_KEY.search(message):
        return _unknown_message(unknown["key"], keys)
    if missing := _MISSING_KEYS.search(message):
        names = [*missing["keys"].strip().split(", "), *_missing_classes(keys, given)]
        order = {name: position for position, name in enumerate(keys)}
        return _missing_message(sorted(names, key=lambda name: order.get(name, 0)), keys)
    wrong = _WRONG_VALUE.search(message)
    if wrong:
        return _wrong_value_message(wrong["got"], wrong["key"], keys, message)
    return f"command line: {message.strip()}{SEE_HELP}"


def _unknown_message(name: str, keys: Mapping[str, Key]) -> str:
    outer, dot, _ = name.rpartition(".")
    if dot and outer in keys and nested_class(keys[outer].type) is not None:
        inner = [key for key in keys if key.startswith(f"{outer}.")]
        # The keys of a nested object are known once its class is chosen.
        if not inner:
            return (
                f"{name}: there is no such key, since {outer}=module:Class is not given, which "
                f"chooses the class that has the keys{SEE_HELP}"
            )
        return f"{name}: there is no such key{nearest(name, inner) or nearest(name, keys)}"
    hint = hint_for(name, keys) or nearest(name, keys)
    return f"{name}: there is no such key{hint}{SEE_HELP}"


def _wrong_value_message(got: str, name: str, keys: Mapping[str, Key], message: str) -> str:
    key = keys.get(name)
    if key is None:  # an entry of a dict or a list: only chz knows its type
        kind = re.search(r"Could not cast '.*' to (\S+)", message)
        return f"{name}: got {got!r}, expected a value of type {kind[1] if kind else 'its list'}"
    expected = f"{name}: got {got!r}, expected {describe_type(key.type)}"
    declared = nested_class(key.type)
    if declared is None:
        return f"{expected}{nearest(got, choices_of(key.type))}"
    # Only the text after this marker names the cause.
    reason = message.rpartition(_NO_CLASS)[2].strip() if _NO_CLASS in message else ""
    module, _, class_name = got.partition(":")
    try:
        # Only classes of that module that the field accepts are suggested.
        found = vars(importlib.import_module(module))
    except (ImportError, ValueError):
        found = {}
    classes = [n for n, c in found.items() if isinstance(c, type) and issubclass(c, declared)]
    meant = nearest(class_name, [name for name in classes if name != class_name])
    return f"{expected}; {reason}{meant}".removesuffix("; ")


def _missing_classes(keys: Mapping[str, Key], given: Mapping[str, str]) -> list[str]:
    # `...name=` sets a key at any depth, so which keys it covers is unknown here.
    if any(name.startswith("...") for name in given):
        return []
    return [k.name for k in keys.values() if k.nested and k.required and k.name not in given]


def _missing_message(names: Sequence[str], keys: Mapping[str, Key]) -> str:
    examples = []
    for name in names:
        if any(key.startswith(f"{name}.0.") for key in keys):  # a list of objects
            examples.append(f"{name}.0.KEY=…")
        else:
            nested = name in keys and keys[name].nested
            examples.append(f"{name}=module:Class" if nested else f"{name}=…")
    got = "got no value" if len(names) == 1 else "got no values"
    expected = "it is required" if len(names) == 1 else "they are required"
    return f"{', '.join(names)}: {got}, and {expected}; add {' '.join(examples)}{SEE_HELP}"
