"""Probes the features of a server with Tinker's protocol, with one small request per feature.

Other servers implement only parts of the protocol, and some ignore unknown settings. A run
probes the features that it needs before its first step (``training.server_needs``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinker_cookbook.backends.protocols import ServiceClient, TrainingClient
from tinker_cookbook.utils.command_line.entrypoint import server_error_message
from tinker_cookbook.utils.imports import tinker

logger = logging.getLogger(__name__)

OWN_SERVER = "tinker_cookbook"
"""Name in the ``healthz`` response of this package's server, which has all features."""

_SECONDS = 10.0
_TOKENS = (1, 2, 3, 1)
_TARGETS = (2, 3, 1, 2)
# Schema in the server's OpenAPI document, and the field that a feature needs.
_FIELDS = {
    "adam:grad_clip_norm": ("AdamParams", "grad_clip_norm"),
    "lora:train_attn": ("LoRAConfig", "train_attn"),
    "lora:train_mlp": ("LoRAConfig", "train_mlp"),
    "lora:train_unembed": ("LoRAConfig", "train_unembed"),
}


def is_own_server(url: str) -> bool:
    """Returns whether ``url`` is a server of this package. Sends no key."""
    found = _get_json(f"{url.rstrip('/')}/api/v1/healthz")
    return str(found.get("server", "")).startswith(OWN_SERVER)


@dataclass
class ServerProbe:
    """Probes the server at ``url`` through the clients of a run, without changing the run.

    Features: ``loss:NAME``, ``custom_loss`` (``forward_backward_custom``), ``topk_targets``
    (cross_entropy with targets [T, K]), ``prompt_logprobs``, ``topk_prompt_logprobs``,
    ``adam:grad_clip_norm``, ``lora:train_attn``, ``lora:train_mlp``, ``lora:train_unembed``.
    """

    url: str
    service: ServiceClient
    model_name: str
    client: TrainingClient | None = None
    _schemas: dict[str, Any] | None = field(default=None, repr=False)

    async def models(self) -> list[str]:
        """Returns the names of the models that the server lists; empty if it lists none."""
        ask = getattr(self.service, "get_server_capabilities", None)
        try:
            # In a thread, because the SDK's method blocks.
            found = await asyncio.to_thread(ask) if ask is not None else None
        except Exception as error:
            logger.debug("get_server_capabilities failed: %r", error)
            return []
        return [model.model_name for model in getattr(found, "supported_models", None) or ()]

    async def lacks(self, feature: str) -> str | None:
        """Returns why the server lacks ``feature``; ``None`` if it has it.

        Features that only the OpenAPI document can show are assumed if there is no document.
        """
        kind, _, name = feature.partition(":")
        if feature in _FIELDS:
            schema, key = _FIELDS[feature]
            known = self._document().get(schema, {}).get("properties")
            missing = known is not None and key not in known
            return f"its {schema} have no {key}, which it would ignore" if missing else None
        pairs = [[target, other] for target, other in zip(_TARGETS, _TOKENS, strict=True)]
        checks: dict[str, Callable[[], Awaitable[str | None]]] = {
            "loss": lambda: self._check_count(name, _TARGETS),
            "custom_loss": self._check_custom_loss,
            "topk_targets": lambda: self._check_count("cross_entropy", pairs),
            "prompt_logprobs": self._check_prompt_logprobs,
            "topk_prompt_logprobs": self._check_topk_prompt_logprobs,
        }
        try:
            return await checks[kind]()
        except Exception as error:
            # A refusal, with the server's message if any.
            return _one_line(server_error_message(error) or str(error) or type(error).__name__)

    async def sums_losses(self) -> bool:
        """Returns whether a pass reports the summed loss, as the Tinker API does."""
        metrics, logprobs = await self._forward("cross_entropy", _TARGETS)
        found = metrics.get("loss:sum", math.nan)
        return math.isclose(found, -sum(logprobs), rel_tol=1e-2, abs_tol=1e-3)

    async def _check_count(self, loss: str, targets: Any) -> str | None:
        _, logprobs = await self._forward(loss, targets)
        got, expected = len(logprobs), np.size(targets)
        if got != expected:
            return f"it returned {got} log-probabilities for {expected} targets"
        return None

    async def _check_custom_loss(self) -> str | None:
        # The SDK sends the gradient of the custom loss as weights of cross_entropy, so the server
        # must sum, and the SDK reads the sum.
        if await self.sums_losses():
            return None
        return "it does not report loss:sum, the summed loss, which the SDK needs for custom losses"

    async def _check_prompt_logprobs(self) -> str | None:
        client = await self.service.create_sampling_client(base_model=self.model_name)
        found = await client.compute_logprobs(tinker.ModelInput.from_ints(list(_TOKENS)))
        values = list(found or ())
        if len(values) != len(_TOKENS):
            return f"it returned {len(values)} log-probabilities for {len(_TOKENS)} prompt tokens"
        if any(value is None or not math.isfinite(value) for value in values[1:]):
            return "it returned none for some prompt tokens"
        return None

    async def _check_topk_prompt_logprobs(self) -> str | None:
        client = await self.service.create_sampling_client(base_model=self.model_name)
        response = await client.sample(
            tinker.ModelInput.from_ints(list(_TOKENS)),
            1,
            tinker.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
        )
        rows = response.topk_prompt_logprobs or ()
        if len(rows) != len(_TOKENS) or any(len(row or ()) != 2 for row in list(rows)[1:]):
            return "it returned no most probable tokens for the prompt"
        return None

    async def _forward(self, loss: str, targets: Any) -> tuple[dict[str, float], list[float]]:
        """Returns metrics and log-probabilities of a forward pass without a gradient."""
        assert self.client is not None
        arrays = {"target_tokens": np.array(targets)}
        ones = np.ones(arrays["target_tokens"].shape, np.float32)
        # Pass exactly the inputs that each loss reads: some servers refuse others.
        if loss == "cross_entropy":
            arrays["weights"] = ones
        else:
            arrays |= {"logprobs": -ones, "advantages": ones}
        if loss == "gspo":
            arrays["sequence_ratio_mask"] = ones
        inputs = {name: tinker.TensorData.from_numpy(array) for name, array in arrays.items()}
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(_TOKENS)), loss_fn_inputs=inputs
        )
        gspo = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
        config = {"dro": {"beta": 0.1}, "gspo": gspo}.get(loss)
        output = await self.client.forward([datum], loss, config)  # type: ignore[arg-type]
        logprobs = output.loss_fn_outputs[0]["logprobs"]
        return dict(output.metrics or {}), [float(v) for v in logprobs.to_numpy().ravel()]

    def _document(self) -> dict[str, Any]:
        if self._schemas is None:
            found = _get_json(f"{self.url.rstrip('/')}/openapi.json")
            self._schemas = found.get("components", {}).get("schemas", {})
        return self._schemas or {}


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def _get_json(url: str) -> dict[str, Any]:
    """Returns the JSON object at a URL; empty if there is none. Sends no key."""
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as response:
            found = json.loads(response.read())
    except (OSError, ValueError, urllib.error.URLError):
        return {}
    return found if isinstance(found, dict) else {}
