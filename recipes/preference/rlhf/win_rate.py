"""Measures how often the policy's answers are preferred to those of stage 1."""

from __future__ import annotations

import json
from typing import Any

from tinker_cookbook import model_info
from tinker_cookbook.backends.connect import connect_with
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.preference.comparison import comparisons_that_fit
from tinker_cookbook.preference.comparison_policy_evaluator import ComparisonEvaluator
from tinker_cookbook.recipes.preference.rlhf.settings import CLIConfig
from tinker_cookbook.recipes.preference.rlhf.stages import held_out, judge_builder
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.tokenizer_utils import get_tokenizer

FILE = "win_rate.json"


async def measure_win_rate(
    cli: CLIConfig, sft: CheckpointRecord, rm: CheckpointRecord | None, rl: CheckpointRecord
) -> dict[str, Any]:
    """Returns the metrics of ``ComparisonEvaluator`` on held-out prompts; writes win_rate.json.

    ``win_rate`` compares stage 3 with stage 1 by the reward model. If stage 3 was trained on it, or
    if there is none and the prompted judge compares, this shows that training worked, not that
    people would agree. ``control_win_rate`` compares two sets of samples of stage 1, 0.5 up to
    chance. A result in the file is reused for the same weights.
    """
    file = cli.folder / FILE
    request = {
        "policy": rl.sampler_path,
        "baseline": sft.sampler_path,
        "reward_model": None if rm is None else rm.sampler_path,
        "judge_both_orders": cli.judge_both_orders,
        "seed": cli.seed,
        "max_tokens": cli.rl_max_tokens,
    }
    # A repeated command does not measure the same weights again.
    if file.exists():
        known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if request.items() <= known.items():
            return known
    # Both answers are new, so a prompt must leave room for two answers of full length.
    judgeable = comparisons_that_fit(
        held_out(cli.comparisons, cli.num_test),
        get_renderer(cli.renderer, get_tokenizer(cli.model_name)),
        model_info.resolve_max_length(cli.model_name, None),
        new_answers=2,
        answer_tokens=cli.rl_max_tokens,
    )
    comparisons = [labeled.comparison for labeled in judgeable]
    with connect_with(cli) as connection:
        service = connection.service
        baseline = await service.create_sampling_client(model_path=sft.sampler_path)
        policy = await service.create_sampling_client(model_path=rl.sampler_path)
        evaluator = ComparisonEvaluator(
            judge_builder(cli, rm),
            comparisons,
            cli.renderer,
            cli.model_name,
            # A judge that scores both orders has already cancelled its position bias.
            both_ways=not cli.judge_both_orders,
            max_tokens=cli.rl_max_tokens,
            baseline=baseline,
            seed=cli.seed,
        )
        # Stage 1 against itself with another seed: its distance from 0.5 is noise.
        control = await evaluator(baseline)
        result = {
            **request,
            **await evaluator(policy),
            "control_win_rate": control["win_rate"],
            "baseline_answer_tokens": control["answer_tokens"],
        }
    write_atomically(file, (json.dumps(result, indent=2) + "\n").encode())
    return result
