"""Frozen reference policy for preference losses and distillation."""

from __future__ import annotations

from tinker_cookbook.backends import SamplingClient, ServiceClient
from tinker_cookbook.sampling_model import client_of_weights
from tinker_cookbook.training.config import TrainingConfig
from tinker_cookbook.training.session import TrainingSession


async def reference_client(
    session: TrainingSession, config: TrainingConfig, reference_model_name: str | None
) -> SamplingClient:
    """Creates the reference client on the connection of a session."""
    connection = session.connection
    return await create_reference_client(
        connection.service, config, reference_model_name, samples_states=connection.kind == "local"
    )


async def create_reference_client(
    service: ServiceClient,
    config: TrainingConfig,
    reference_model_name: str | None,
    *,
    samples_states: bool = False,
) -> SamplingClient:
    """Creates a client of the initial policy, also in a resumed run.

    The initial policy is ``load_checkpoint_path`` or else the base model; on the local engine it
    shares the base weights with the policy. ``reference_model_name`` selects another reference: a
    base model, or the tinker:// path of saved weights. ``samples_states``: the backend can sample
    from training states too, as the local engine does.
    """
    name = reference_model_name
    if name is not None and not name.startswith("tinker://"):
        return await service.create_sampling_client(base_model=name)
    # Not the weights of a resumed run, because the reference must not change with the policy.
    path = name or config.load_checkpoint_path
    if path is None:
        return await service.create_sampling_client(base_model=config.model_name)
    return await client_of_weights(service, path, samples_states=samples_states)
