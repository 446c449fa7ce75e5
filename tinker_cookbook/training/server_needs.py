"""Checks before the first step that a server has the features that a run needs.

Each loop's config lists its needs (``server_needs``). A missing feature ends the run with one
sentence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.backends import Connection, TrainingClient
from tinker_cookbook.engine.model.resolve import base_name
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.leaves import find_leaf

ELSEWHERE = "or use backend=local, the hosted API or our own server, which have it (docs/scale.md)"


@dataclass(frozen=True)
class Need:
    """A server feature that a run needs.

    Attributes:
        feature: Name of the feature, as in ``ServerProbe``.
        setting: The setting that needs it, such as ``kl_penalty_coef=0.1``.
        instead: Advice for the user, such as ``set kl_penalty_coef=0``.
    """

    feature: str
    setting: str
    instead: str = ""


class ServerCheck:
    """Checks the server for one run; ``lines`` are messages for the user."""

    def __init__(self, connection: Connection, model_name: str) -> None:
        self.lines: list[str] = []
        self._probe: Any = None
        url = connection.target[1] or os.environ.get("TINKER_BASE_URL")
        # The hosted service and this package's server have all features, so do not probe them.
        remote = connection.kind == "tinker" and not connection.is_hosted_service
        probing = find_leaf("backends.server_probe") if remote and url else None
        if probing is not None and not probing.is_own_server(url):
            self._probe = probing.ServerProbe(url, connection.service, base_name(model_name))

    async def check_model(self) -> None:
        """Raises ``BackendError`` if the server lists models without the run's model."""
        probe = self._probe
        if probe is None:
            return
        models = await probe.models()
        # Some servers ignore the requested name and train the model that they have.
        if models and probe.model_name not in models:
            raise BackendError(
                f"model_name: got {probe.model_name}, but the server at {probe.url} has "
                f"{', '.join(models)}; set model_name to one of these"
            )

    async def check_needs(self, client: TrainingClient, needs: Sequence[Need]) -> None:
        """Probes each need; raises ``BackendError`` with one sentence for missing features."""
        probe = self._probe
        if probe is None:
            return
        probe.client = client
        self.lines.append(f"checking the features of the server at {probe.url}")
        # Probe each feature once, although several settings may need it.
        features = dict.fromkeys(need.feature for need in needs)
        reasons = {feature: await probe.lacks(feature) for feature in features}
        lacking = {need: reason for need in needs if (reason := reasons[need.feature]) is not None}
        if lacking:
            parts = "; ".join(
                f"{need.setting} needs {_text(need)} ({reason})" for need, reason in lacking.items()
            )
            advice = ", ".join(dict.fromkeys(need.instead for need in lacking if need.instead))
            raise BackendError(
                f"the server at {probe.url} cannot run this: {parts}. "
                f"{advice[:1].upper() + advice[1:] if advice else 'Choose another recipe'}, "
                f"{ELSEWHERE}"
            )
        if not await probe.sums_losses():
            self.lines.append(
                "the server reports no summed loss (loss:sum), so it may train on a mean over "
                "tokens or sequences: a learning_rate found on another backend may not fit"
            )


def _text(need: Need) -> str:
    kind, _, name = need.feature.partition(":")
    return {
        "loss": f"the loss {name}",
        "custom_loss": "custom losses (forward_backward_custom)",
        "topk_targets": "cross_entropy with several targets per position",
        "prompt_logprobs": "log-probabilities of prompts",
        "topk_prompt_logprobs": "the most probable tokens of prompts",
        "adam": f"the optimizer's {name}",
        "lora": f"the choice of adapted layers ({name})",
    }[kind]
