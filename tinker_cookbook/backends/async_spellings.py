"""The ``*_async`` spellings that SDKs before 0.38 had, for the clients of the bundled engine.

Awaiting a request's async twin gives its future, as it did there; awaiting a client-making twin
gives the client.
"""

from __future__ import annotations

from typing import Any


class TrainingAsync:
    """Async twins of a training client's methods."""

    async def forward_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``forward``."""
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]

    async def forward_backward_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``forward_backward``."""
        return self.forward_backward(*args, **kwargs)  # type: ignore[attr-defined]

    async def forward_backward_custom_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``forward_backward_custom``."""
        return self.forward_backward_custom(*args, **kwargs)  # type: ignore[attr-defined]

    async def optim_step_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``optim_step``."""
        return self.optim_step(*args, **kwargs)  # type: ignore[attr-defined]

    async def save_state_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``save_state``."""
        return self.save_state(*args, **kwargs)  # type: ignore[attr-defined]

    async def save_weights_for_sampler_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``save_weights_for_sampler``."""
        return self.save_weights_for_sampler(*args, **kwargs)  # type: ignore[attr-defined]

    async def load_state_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``load_state``."""
        return self.load_state(*args, **kwargs)  # type: ignore[attr-defined]

    async def load_state_with_optimizer_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``load_state_with_optimizer``."""
        return self.load_state_with_optimizer(*args, **kwargs)  # type: ignore[attr-defined]

    async def get_info_async(self) -> Any:
        """Older spelling of ``get_info``."""
        return self.get_info()  # type: ignore[attr-defined]

    async def save_weights_and_get_sampling_client_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``await save_weights_and_get_sampling_client(...)``."""
        client = self.save_weights_and_get_sampling_client(*args, **kwargs)  # type: ignore[attr-defined]
        return await client

    async def create_sampling_client_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``await create_sampling_client(...)``."""
        return await self.create_sampling_client(*args, **kwargs)  # type: ignore[attr-defined]


class ServiceAsync:
    """Async twins of a service client's methods."""

    async def create_lora_training_client_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``await create_lora_training_client(...)``."""
        return await self.create_lora_training_client(*args, **kwargs)  # type: ignore[attr-defined]

    async def create_training_client_from_state_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``await create_training_client_from_state(...)``."""
        return await self.create_training_client_from_state(*args, **kwargs)  # type: ignore[attr-defined]

    async def create_training_client_from_state_with_optimizer_async(
        self, *args: Any, **kwargs: Any
    ) -> Any:
        """Older spelling of ``await create_training_client_from_state_with_optimizer(...)``."""
        make = self.create_training_client_from_state_with_optimizer  # type: ignore[attr-defined]
        return await make(*args, **kwargs)

    async def create_sampling_client_async(self, *args: Any, **kwargs: Any) -> Any:
        """Older spelling of ``await create_sampling_client(...)``."""
        return await self.create_sampling_client(*args, **kwargs)  # type: ignore[attr-defined]

    async def get_server_capabilities_async(self) -> Any:
        """Older spelling of ``get_server_capabilities()``."""
        return self.get_server_capabilities()  # type: ignore[attr-defined]
