"""What a recipe of reinforcement learning takes over into its ``train.Config`` under one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chz

from tinker_cookbook.exceptions import nearest
from tinker_cookbook.rl.advantages import AdvantageNormalization
from tinker_cookbook.training.config import RunSettings
from tinker_cookbook.training.lr_scheduling import LRSchedule

# Names of algorithms, which are a loss together with a way to turn rewards into advantages.
_ALGORITHMS = {
    "grpo": "GRPO is loss_fn=importance_sampling or ppo with advantage_normalization=std",
    "dr_grpo": "Dr. GRPO is loss_fn=importance_sampling or ppo with advantage_normalization=center",
    "rloo": "RLOO is loss_fn=importance_sampling with advantage_normalization=leave_one_out",
    "dapo": "DAPO is loss_fn=ppo with loss_fn_config.clip_high_threshold=1.28 and "
    "remove_constant_reward_groups=True",
    "reinforce": "REINFORCE is loss_fn=importance_sampling on samples of the present weights",
}

RL_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
DEFAULT_LOSS = "importance_sampling"
LOSS_NORMALIZATIONS = ("sum", "tokens")
# Their penalties are no advantages, so dividing the advantages alone would change the balance.
LOSSES_WITH_PENALTY = ("dro", "stable_reinforce")


def loss_hint(name: str, losses: Sequence[str] = RL_LOSSES) -> str:
    """The end of a refusal of ``loss_fn``: which loss and settings were meant, where that is known.

    GRPO: arXiv 2402.03300; Dr. GRPO: 2503.20783; RLOO: 2402.14740; DAPO: 2503.14476.
    """
    known = _ALGORITHMS.get(name.lower().replace("-", "_").replace(".", ""))
    return f"; {known}" if known is not None else nearest(name, losses)


@chz.chz
class PolicySettings(RunSettings):
    """How samples are drawn, what is learned from them, and what is written of them."""

    temperature: float = chz.field(
        default=1.0, doc="Of sampling. The losses assume 1: they compare with log-probs at 1"
    )
    top_p: float = chz.field(default=1.0, doc="Sample among the tokens that hold this much; 1: all")
    top_k: int = chz.field(default=-1, doc="Sample among this many tokens; -1: all")
    eval_temperature: float = chz.field(default=1.0, doc="Temperature on the test set; 0: greedy")
    lr_schedule: LRSchedule = chz.field(default="constant", doc="linear, cosine or constant")

    loss_fn: str = chz.field(default=DEFAULT_LOSS, doc=f"One of {', '.join(RL_LOSSES)}")
    loss_fn_config: dict[str, float] | None = chz.field(
        default=None, doc="The loss's own settings: loss_fn_config.clip_high_threshold=1.3"
    )
    advantage_normalization: AdvantageNormalization = chz.field(
        default="center", doc="center, std or leave_one_out"
    )
    loss_normalization: str = chz.field(
        default="sum",
        doc="sum over the tokens of a step, as the Tinker API has it, or tokens: their mean, as in "
        "TRL (advantages are divided by the number of action tokens)",
    )
    remove_constant_reward_groups: bool = chz.field(
        default=False, doc="Leave groups without any difference in reward out of training"
    )
    num_substeps: int = chz.field(default=1, doc="Optimizer steps a batch is split into")
    kl_penalty_coef: float = chz.field(default=0.0, doc="Weight of the KL penalty; 0: none")
    kl_discount_factor: float = chz.field(
        default=0.0, doc="Discount at which a token pays for the KL of those after it; 0: its own"
    )
    compute_post_kl: bool = chz.field(
        default=False, doc="Score each batch again with the new weights (kl_pre_post_v1/_v2)"
    )

    eval_every: int = chz.field(default=20, doc="Steps between evaluations; 0 is never")
    num_groups_to_log: int = chz.field(default=4, doc="Groups whose transcripts are written a step")
    rollout_json_export: bool = chz.field(
        default=True, doc="Write transcripts of all groups as JSON lines too"
    )

    def shared(self) -> dict[str, Any]:
        """These settings, and those of the run, by name."""
        return {name: getattr(self, name) for name in chz.chz_fields(PolicySettings)}
