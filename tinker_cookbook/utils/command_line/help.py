"""Builds the ``--help`` text of a config class: keys in groups, with type and default.

A training program has about a hundred keys: ``--help`` lists those that people change first, and
``--help=all`` the others too.
"""

from __future__ import annotations

import enum
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import chz

from tinker_cookbook.utils.command_line.keys import Key, aliases_of, describe_type, keys_of
from tinker_cookbook.utils.command_line.programs import (
    print_whole,
    running_command,
    with_recipes_of_folder,
)

_TASK = "Task"

# The groups of keys, in the order of the help text; within a group the common keys come first. A
# key that is in no group is specific to the program, so it belongs to its task.
_GROUPS: dict[str, str] = {
    _TASK: "model_name env dataset dataset_path file_path dataset_builder dataset_configs "
    "test_path test_size renderer_name",
    "Training": "learning_rate batch_size groups_per_batch group_size num_epochs max_steps "
    "num_steps lora_rank max_length loss_fn loss_fn_config advantage_normalization "
    "loss_normalization importance_ratio_cap kl_penalty_coef dpo_beta dpo_loss lr_schedule "
    "warmup_steps seed load_checkpoint_path weight_decay grad_clip_norm adam_beta1 adam_beta2 "
    "adam_eps train_attn train_mlp train_unembed train_vision train_on_what num_substeps "
    "remove_constant_reward_groups kl_discount_factor kl_reference_model kl_reference_path "
    "kl_reference_config compute_post_kl kl_depth_edges label_smoothing simpo_gamma "
    "reference_model_name max_steps_off_policy stale_groups num_minibatches async_config "
    "stream_minibatch_config submit_ahead replay_router random_rewards",
    "Sampling": "max_tokens temperature top_p top_k eval_temperature rollout_max_retries "
    "rollout_error_tolerance rollout_config termination",
    "Checkpoints": "log_path behavior_if_log_dir_exists allow_config_change save_every "
    "save_every_tokens save_every_seconds rolling_save_every rolling_ttl_seconds ttl_seconds "
    "async_periodic_saves",
    "Evaluation and logging": "eval_every infrequent_eval_every best_metric best_metric_mode "
    "early_stopping_patience evaluator_builders "
    "infrequent_evaluator_builders show_samples data_report record num_groups_to_log "
    "rollout_json_export trackers wandb_project wandb_name session_name recipe_name enable_trace "
    "span_chart_every store",
    "Backend": "backend base_url server_wait device dtype base_dtype shard_base sampler "
    "vllm_python vllm_args vllm_timeout num_replicas",
}
_POSITIONS = {
    name: (group, position)
    for group, names in _GROUPS.items()
    for position, name in enumerate(names.split())
}  # fmt: skip


# Of a program with many keys, the short help has these and those of its own task.
_FIRST = (
    "model_name learning_rate dpo_beta batch_size groups_per_batch group_size num_epochs max_steps "
    "lora_rank max_tokens log_path"
)
_MANY = 50

_WIDTH = 100
_EXAMPLES = 2
_FEW_KEYS = 12  # below this a list needs no groups
_LONGEST_IN_COLUMN = 30  # a longer name, as nested keys have, is on a separate line


def help_text(
    config_class: type[Any],
    command: str,
    about: str = "",
    chosen: Mapping[str, str] | None = None,
    whole: bool = True,
) -> str:
    """Returns what ``--help`` prints.

    Args:
        config_class: The chz class that the arguments build.
        command: How the program is started, for the first line.
        about: Docstring of the program: its first paragraph describes it, and the lines that
            begin with ``python -m`` are examples.
        chosen: Nested classes that the command line names already, to list their keys.
        whole: Whether to list all keys.
    """
    # The first paragraph without its commands, then all commands with continued lines joined.
    paragraph = textwrap.dedent(about.strip()).partition("\n\n")[0].splitlines()
    first = " ".join(line for line in paragraph if "python -m" not in line).rstrip(":")
    commands = [" ".join(line.split()) for line in about.replace("\\\n", " ").splitlines()]
    examples = list(dict.fromkeys(line for line in commands if line.startswith("python -m ")))
    examples.sort(key=lambda line: "=" not in line)  # those with keys are more useful
    keys = list(keys_of(config_class, chosen or {}))
    if not examples:
        examples = [" ".join([command, *(f"{key.name}=…" for key in keys if key.required)])]

    lines = [f"{command} [key=value ...]", ""]
    for text in (first, config_class.__doc__ or ""):
        if text.strip():
            lines += [*textwrap.wrap(" ".join(text.split()), _WIDTH), ""]
    examples = examples[:_EXAMPLES]
    lines += ["Examples:" if len(examples) > 1 else "Example:", *(f"  {e}" for e in examples), ""]
    if whole or len(keys) <= _MANY:
        more = []
    else:
        first = [key for key in keys if _is_first(key, chosen or {})]
        more, keys = [f"{len(keys) - len(first)} more keys: --help=all"], first
    lines += [*_key_lines(config_class, keys), *more]
    if "config" not in chz.chz_fields(config_class):
        lines += [
            "",
            "config=FILE: these keys from a YAML or JSON file, or config=LOG_PATH of a run",
        ]
    return "\n".join(lines)


def _is_first(key: Key, chosen: Mapping[str, str]) -> bool:
    name = key.name.partition(".")[0]
    group, _ = _POSITIONS.get(name, ("", 0))
    own = not group or (group == _TASK and not key.nested and "." not in key.name)
    return own or key.required or name in chosen or name in _FIRST.split()


def print_help(config_class: type[Any], chosen: Mapping[str, str], whole: bool) -> None:
    """Prints the help of the running program."""
    main = sys.modules["__main__"]
    about, spec = main.__doc__ or "", main.__spec__
    if spec is not None and spec.name.endswith(".__main__"):
        # `python -m package` runs package.__main__; the package's docstring describes it.
        package = sys.modules[spec.name.removesuffix(".__main__")]
        about = f"{package.__doc__ or ''}\n\n{about}"
    text = help_text(config_class, running_command(), about, chosen, whole)
    print_whole(with_recipes_of_folder(text))


def _key_lines(config_class: type[Any], keys: list[Key]) -> list[str]:
    widths = [len(key.name) for key in keys if len(key.name) <= _LONGEST_IN_COLUMN]
    indent = 4 + max(widths, default=0)
    also: dict[str, list[str]] = {}
    for alias, name in aliases_of(config_class).items():
        also.setdefault(name, []).append(alias)
    # All groups in their fixed order; those without keys are skipped below.
    groups: dict[str, list[Key]] = {group: [] for group in _GROUPS}
    # The keys of a nested object follow the object itself, since sorting is stable.
    # Keys that are in no group are listed after the common ones of the task.
    default = (_TASK, len(_POSITIONS))
    position = {key.name: _POSITIONS.get(key.name.partition(".")[0], default) for key in keys}
    for key in sorted(keys, key=lambda key: position[key.name][1]):
        groups[position[key.name][0]].append(key)
    if len(keys) < _FEW_KEYS:
        groups = {"Keys": [key for members in groups.values() for key in members]}
    lines: list[str] = []
    for title, members in groups.items():
        if not members:
            continue
        lines.append(f"{title}:")
        for key in members:
            lines += _lines_of(key, indent, also.get(key.name, []))
        lines.append("")
    return lines[:-1]


def _lines_of(key: Key, indent: int, also: list[str]) -> list[str]:
    default = key.default.value if isinstance(key.default, enum.Enum) else key.default
    shown = repr(default) if default == "" or isinstance(default, (list, dict)) else default
    need = f"default {shown}"
    if key.required:
        need = "required"
    elif key.needed_with:
        need = f"required with other keys of {key.needed_with}"
    text = f"{key.meaning.rstrip('.')} [{describe_type(key.type)}; {need}]"
    if also:
        text += f" Also: {', '.join(also)}"
    if key.nested:
        text += f" Its own keys: {key.name}.KEY=…; with {key.name}=… --help lists them"
    wrapped = textwrap.wrap(
        text, max(40, _WIDTH - indent), break_long_words=False, break_on_hyphens=False
    )
    lines = [" " * indent + line for line in wrapped]
    if len(key.name) > indent - 4:
        return [f"  {key.name}", *lines]
    return [f"  {key.name:{indent - 4}}  {wrapped[0]}", *lines[1:]]
