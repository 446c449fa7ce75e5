"""The processes of torchrun, as an engine of each of them uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tinker_cookbook.engine.extensions.parallel.launch import Followers, in_step, processes
from tinker_cookbook.engine.extensions.parallel.run import DataParallelRun
from tinker_cookbook.engine.extensions.parallel.sharding import Sharding, gathers_of
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.resolve import ResolvedModel
from tinker_cookbook.engine.processes import Processes
from tinker_cookbook.engine.training.run import TrainingRun
from tinker_cookbook.exceptions import ConfigurationError


class JoinedProcesses(Processes):
    """Several processes. In process 0 one engine at a time has the others as followers; the other
    processes' engines, and further ones of process 0, train alone."""

    def __init__(self) -> None:
        assert processes.this is not None
        self._process = processes.this
        self._followers: Followers | None = None
        self.several = processes.followers is not None

    def device(self, requested: str) -> str:
        """See ``Processes.device``: each process has a GPU of its own."""
        return self._process.device(requested)

    def open(
        self, device: str, dtype: str, base_dtype: str, replay_router: bool, shard_base: bool
    ) -> None:
        """See ``Processes.open``."""
        followers = processes.followers
        if followers is not None and followers.claim():
            followers.open_engines(device, dtype, base_dtype, replay_router, shard_base)
            self._followers, self.count = followers, self._process.world
        elif self._process.rank == 0:
            super().open(device, dtype, base_dtype, replay_router, shard_base)
        self._base_dtype = base_dtype
        self.shards = self._process.world if shard_base else 1

    def load_base(
        self, name: str, resolved: ResolvedModel, make: Callable[..., BaseModel]
    ) -> BaseModel:
        """See ``Processes.load_base``; all processes shard a base model at the same time."""
        followers = self._followers
        if self.shards == 1:
            return make()
        if followers is None:
            return _sharded(make, self._base_dtype)
        with self._loading_of_followers(followers, name, resolved):
            base = _sharded(make, self._base_dtype)
        base.with_processes = partial(followers.assisting, name, gathers_of(base))
        return base

    @contextmanager
    def loading(self, name: str, resolved: ResolvedModel) -> Iterator[None]:
        """See ``Processes.loading``."""
        if self._followers is None or self.shards > 1:  # ``load_base`` does it
            yield
            return
        with self._loading_of_followers(self._followers, name, resolved):
            yield

    @contextmanager
    def _loading_of_followers(
        self, followers: Followers, name: str, resolved: ResolvedModel
    ) -> Iterator[None]:
        loading = followers.start("load_base", name, resolved)
        try:
            yield
        finally:
            loading.wait()

    def new_run(self, *arguments: Any) -> TrainingRun:
        """See ``Processes.new_run``."""
        if self._followers is None:
            return super().new_run(*arguments)
        return DataParallelRun(*arguments, followers=self._followers)

    def close(self, wait: bool = True) -> None:
        """See ``Processes.close``."""
        followers, self._followers = self._followers, None
        if followers is not None:
            followers.release(wait)


def _sharded(make: Callable[..., BaseModel], base_dtype: str) -> BaseModel:
    """Returns a base model of which each process keeps a shard."""
    with in_step("loading a base model, sharded among the processes,", (ConfigurationError,)):
        base = make(sharding=Sharding(base_dtype))
        # Their trials run the layers, so all processes make them now.
        _ = base.kv_shapes, base.packs_rows, base.shared_layout
    return base
