"""Further settings of the bundled engine, besides device and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinker_cookbook.engine.device_names import check_base_dtype_name, check_joint_training
from tinker_cookbook.exceptions import ConfigurationError


@dataclass(frozen=True)
class EngineSettings:
    """``base_dtype``: auto, nf4 or int8, the storage format of a base model's matrices.
    ``replay_router``: train routed experts with the choices of the sampler's routers.

    ``joint_training``: auto (on CUDA), true or false: whether small ``forward_backward`` passes of
    several runs on one base model are computed together if they are queued at the same time. The
    lowest bits of a run's results then depend on the other runs in the pass.

    ``shard_base``: divide the base model among the processes of torchrun."""

    base_dtype: str = "auto"
    replay_router: bool = False
    joint_training: str = "auto"
    shard_base: bool = False

    @classmethod
    def of(cls, settings: Any) -> EngineSettings:
        """Reads the fields from settings; missing fields keep their defaults."""
        names = cls.__dataclass_fields__
        return cls(**{name: getattr(settings, name) for name in names if hasattr(settings, name)})

    def check(self, *, local: bool = True) -> None:
        """Raises ``ConfigurationError`` for unknown values, for two that exclude each other, and
        for any value with a remote backend."""
        check_base_dtype_name(self.base_dtype)
        check_joint_training(self.joint_training)
        for name, field in self.__dataclass_fields__.items():
            if not local and getattr(self, name) != field.default:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)}: the remote backend decides that itself; leave "
                    f"{name} out or set backend=local"
                )
