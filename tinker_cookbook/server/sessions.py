"""What a client has open: its models and samplers, until it ends or its heartbeat lapses."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.backends.local import LocalServiceClient
from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.backends.local_training import LocalTrainingClient
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.ordered_dispatch import OrderedDispatcher

KEPT_SAMPLERS = 8
IDLE_SECONDS = 900.0


@dataclass(eq=False)
class Model:
    """An adapter in training."""

    model_id: str
    turns: OrderedDispatcher
    client: LocalTrainingClient | None = None
    """Set by the first of the turns."""


@dataclass(eq=False)
class OpenSampler:
    """A fixed version of weights to sample from."""

    sampler_id: str
    client: LocalSamplingClient | None
    """None once it was put away; what has a path, or is a base model, can be opened again."""
    base_model: str
    model_path: str | None = None
    is_snapshot: bool = False
    inflight_of: str | None = None
    """The model whose later saves of this kind it follows."""
    used_at: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Session:
    """One client program."""

    session_id: str
    owner: Owner
    service: LocalServiceClient
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    began_at: float = field(default_factory=time.time)
    seen_at: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, OpenSampler] = field(default_factory=dict)

    def model_id(self, number: int) -> str:
        """The id that the client computes too."""
        return f"{self.session_id}:train:{number}"

    def sampler_id(self, number: int) -> str:
        """The id that the client computes too."""
        return f"{self.session_id}:sample:{number}"

    def take_inflight(self, model_id: str, client: LocalSamplingClient) -> None:
        """Gives all samplers that follow a model its newer weights; what they draw goes on."""
        for sampler in self.samplers.values():
            if sampler.inflight_of == model_id:
                sampler.client = client

    def seen(self) -> None:
        """Notes that the client lives."""
        self.seen_at = time.monotonic()

    def put_away(self, now: float) -> None:
        """Lets go of the weights of samplers that nobody has used for long, but for the last few:
        clients cannot say that they are done with one, and a run makes one a step."""
        opened = [one for one in self.samplers.values() if one.client is not None]
        opened.sort(key=lambda one: one.used_at, reverse=True)
        for sampler in opened[KEPT_SAMPLERS:]:
            if now - sampler.used_at < IDLE_SECONDS:
                continue
            sampler.client = None
            if sampler.is_snapshot:
                del self.samplers[sampler.sampler_id]

    def close(self) -> None:
        """Forgets models and samplers, and so their memory."""
        for model in self.models.values():
            model.turns.close()
        self.models.clear()
        self.samplers.clear()
