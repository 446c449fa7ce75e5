"""RLHF in three stages: supervised training, reward model, reinforcement learning.

    python -m recipes.preference.rlhf.rlhf_pipeline
    python -m recipes.preference.rlhf.rlhf_pipeline run_sft=True run_rm=False run_rl=False …
    python -m recipes.preference.rlhf.rlhf_pipeline dataset=hhh model_name=… lora_rank=64 …

The stages of Ouyang et al. 2022 (arXiv 2203.02155), each in its own folder of ``log_path``:

1. ``sft``: supervised training on demonstrations;
2. ``rm``: a model learns which of two answers is better (``rm/accuracy``);
3. ``rl``: RL from the model of stage 1. The reward is the reward model's comparison of pairs of
   answers, with a KL penalty towards stage 1. With ``judge=prompted`` the base model compares.

At the end ``win_rate.json`` has the win rate of stage 3 against stage 1, as the reward model of
stage 2 judges: 0.65 - 0.72 by default. With ``judge=prompted run_rm=False`` there is no stage 2,
and the prompted judge measures its own work.

To continue, run the same command: a finished stage is skipped, an interrupted stage resumes.
``config=LOG_PATH/settings.json log_path=NEW`` repeats all stages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.checkpoint_utils import CheckpointRecord, get_last_checkpoint
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.preference.rlhf.settings import STAGES, CLIConfig
from tinker_cookbook.recipes.preference.rlhf.stages import (
    held_out,
    rl_config,
    rm_config,
    sft_config,
)
from tinker_cookbook.recipes.preference.rlhf.win_rate import FILE, measure_win_rate
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.run.changes import changed_settings
from tinker_cookbook.run.config import write_config
from tinker_cookbook.supervised import train as sft_train
from tinker_cookbook.training.config import TrainingConfig, check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

T = TypeVar("T", bound=TrainingConfig)

_TITLES = {
    "sft": "stage 1, demonstrations",
    "rm": "stage 2, the reward model",
    "rl": "stage 3, reinforcement learning",
}
SETTINGS = "settings.json"
_UPSTREAM = ("load_checkpoint_path", "rm_weights_path")


async def main(config: CLIConfig) -> None:
    """Runs the selected stages that are not finished, and then measures."""
    check(config)
    behavior = config.behavior_if_log_dir_exists
    with ExitStack() as folders:
        # Check all at once, so that an error in the last folder appears before the first stage.
        for stage in to_run(config):
            folders.enter_context(cli_utils.log_dir_of_run(config.stage_folder(stage), behavior))
        # The stages record their own settings; this file repeats all of them, also if a call runs
        # only some.
        config.folder.mkdir(parents=True, exist_ok=True)
        every = chz.replace(config, run_sft=True, run_rm=has_rm(config), run_rl=True)
        write_config(config.folder / SETTINGS, every)
        if config.run_sft:
            await run_stage("sft", sft_config(config), sft_train.main)
        if config.run_rm:
            await run_stage("rm", rm_config(config), sft_train.main)
        if config.run_rl:
            # Also if these stages did not run now: an earlier call may have trained them.
            sft = finished(config, "sft")
            rm = finished(config, "rm") if has_rm(config) else None
            await run_stage("rl", rl_config(config, sft, rm), rl_train.main)
            result = await measure_win_rate(config, sft, rm, finished(config, "rl"))
            judge = "the prompted judge, which it was trained by" if rm is None else _TITLES["rm"]
            print_line(
                f"win rate of stage 3 against stage 1: {result['win_rate']:.3f}, 95% interval "
                f"{result['win_rate_low']:.3f} to {result['win_rate_high']:.3f}, over "
                f"{result['num_comparisons']:.0f} held-out prompts; judged by {judge}\n"
                f"stage 1 against itself (a control): {result['control_win_rate']:.3f}\n"
                f"tokens of an answer: {result['baseline_answer_tokens']:.0f} before, "
                f"{result['answer_tokens']:.0f} after\n"
                f"written to {config.folder / FILE}"
            )


def to_run(cli: CLIConfig) -> list[str]:
    """Returns the selected stages."""
    return [stage for stage in STAGES if getattr(cli, f"run_{stage}")]


def has_rm(cli: CLIConfig) -> bool:
    """Returns whether there is a reward model: a run with a prompted judge may have none."""
    last = get_last_checkpoint(cli.stage_folder("rm"), "sampler_path")
    return cli.judge == "trained" or cli.run_rm or bool(last and last.final)


def check(cli: CLIConfig) -> None:
    """Raises ``ConfigurationError`` or ``DataError`` for what would stop a later stage."""
    if not to_run(cli):
        raise ConfigurationError("run_sft, run_rm, run_rl: got none, expected one True at least")
    check_model(cli)
    if cli.run_sft:
        sft_config(cli).check()
    if cli.run_rm:
        rm_config(cli).check()
    if cli.run_rm or cli.run_rl:
        # Reads the data now: a missing held-out part must not stop the run after stage 1.
        held_out(cli.comparisons, cli.num_test)
    if cli.run_rl:
        if not cli.run_sft:
            finished(cli, "sft")
        if has_rm(cli) and not cli.run_rm:
            finished(cli, "rm")
        # The initial weights of stage 3 exist only after the previous stages.
        later = CheckpointRecord(
            "final", state_path="tinker://run/weights/later", sampler_path="tinker://run/s/later"
        )
        rl_config(cli, later, later).check()


def finished(cli: CLIConfig, stage: str) -> CheckpointRecord:
    """Returns the final checkpoint of a stage; raises ``ConfigurationError`` if it has none."""
    folder = cli.stage_folder(stage)
    last = get_last_checkpoint(folder, "sampler_path")
    if last is not None and last.final:
        return last
    found = "no checkpoint" if last is None else f"only an unfinished run (step {last.batch})"
    raise ConfigurationError(
        f"run_{stage}=False: {folder}/checkpoints.jsonl has {found}, and stage 3 needs the final "
        f"one of {_TITLES[stage]}; train it with the same command and run_{stage}=True"
        + ", or set judge=prompted"
        * (stage == "rm")
    )


async def run_stage(stage: str, config: T, train: Callable[[T], Awaitable[None]]) -> None:
    """Trains or resumes a stage; skips one that is finished with the same settings."""
    last = get_last_checkpoint(config.log_path)
    changed = changed_settings(config.log_path, config.resolved())
    # Stage 3 depends on the weights of stages 1 and 2. A resumed run on new weights would mix two
    # starting points or two rewards.
    other = [line for name, line in changed.items() if name.endswith(_UPSTREAM)]
    if other and last is not None:
        raise ConfigurationError(
            f"{config.log_path} holds a run of {_TITLES[stage]} that began from other weights "
            f"({'; '.join(other)}); start this stage over with run_{stage}=True and "
            "behavior_if_log_dir_exists=delete, the others off, or give another log_path"
        )
    # With changed settings the training loop decides whether the stage may continue.
    if last is not None and last.final and not changed:
        print_line(f"{_TITLES[stage]}: finished before, {last.batch} steps, {last.sampler_path}")
        return
    print_line(f"{_TITLES[stage]}: {config.log_path}")
    await train(config)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
