"""The processes that torchrun has started, as each of them sees the others (see ``join``).

Imports neither torch nor torch.distributed unless torchrun has started this process.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from tinker_cookbook.engine.device_names import check_device_name
from tinker_cookbook.engine.extensions.parallel.messages import (
    FAILING,
    QUESTION,
    Answer,
    Call,
    Channel,
)
from tinker_cookbook.engine.worker import finish_operations
from tinker_cookbook.exceptions import ConfigurationError

if TYPE_CHECKING:
    from tinker_cookbook.engine.extensions.parallel.sharding import Gathers

_COLLECTIVE_MINUTES = 5
"""How long one rank waits for the others in a collective, which they enter within seconds."""

_RESUME = (
    "Saved checkpoints are intact: start the same command again to resume from the last one, with "
    "any number of processes"
)


@dataclass(frozen=True)
class ProcessRank:
    """Number of this process, and how many there are."""

    rank: int
    world: int

    def device(self, requested: str) -> str:
        """Returns the device of this rank: ranks on GPUs have one each.

        Raises:
            ConfigurationError: more processes than GPUs, or one GPU for all of them.
        """
        import torch

        name = check_device_name(requested)
        if name == "mps" or name.startswith("cuda:"):
            raise ConfigurationError(
                f"device: got {name!r} for {self.world} processes of torchrun, which need a GPU "
                "each; set device=cuda (CUDA_VISIBLE_DEVICES selects the GPUs) or device=cpu"
            )
        if name == "cpu" or not torch.cuda.is_available():
            # ``auto`` on a Mac must not give all ranks the one GPU.
            return "cpu" if name == "auto" else name
        if (count := torch.cuda.device_count()) < self.world:
            raise ConfigurationError(
                f"torchrun started {self.world} processes, but this machine shows {count} GPU(s); "
                f"start it with --nproc-per-node {count}, or set device=cpu"
            )
        return f"cuda:{self.rank}"


class Followers:
    """The other ranks, as rank 0 sees them. One engine at a time uses them."""

    def __init__(
        self, channels: Mapping[int, Channel], pids: Mapping[int, int], store: Any
    ) -> None:
        self.process = ProcessRank(0, len(channels) + 1)
        self.ranks = tuple(channels)
        self.ended_runs: list[int] = []  # that the other ranks still keep
        self._channels, self._pids, self._store = channels, pids, store
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}
        self._process = os.getpid()
        self._used = threading.Lock()
        for rank in channels:
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()

    def claim(self) -> bool:
        """Reserves the ranks for an engine; false if they serve another one, or after a fork."""
        return os.getpid() == self._process and self._used.acquire(blocking=False)

    def release(self, wait: bool = True) -> None:
        """Ends the engines of the other ranks."""
        closing = self.start("close_engine")
        if wait:
            closing.wait()
        self._used.release()

    def open_engines(self, *settings: Any) -> None:
        """Creates the engine of each rank (``settings`` as in ``Follower._open_engine``), and the
        process group for tensors."""
        opened = self.start("open_engine", *settings)
        start_process_group(self._store, self.process)
        opened.wait()

    @contextmanager
    def assisting(self, model: str, gathers: Gathers) -> Iterator[None]:
        """Lets the other ranks run the layers of a sharded base model once, as rank 0 does in the
        block."""
        self.start("assist", model)
        doing = "running the layers of the sharded base model"
        with keeping_step(doing, gathers, lambda: gathers.of_pass((), backward=False)):
            yield

    def start(self, name: str, *args: Any) -> Call:
        """Starts the same operation on all other ranks."""
        return self.start_each(name, dict.fromkeys(self.ranks, args))

    def start_each(
        self, name: str, args: Mapping[int, tuple[Any, ...]], answer: Answer | None = None
    ) -> Call:
        """Starts an operation on the ranks of ``args``, with their arguments.

        ``answer`` serves the questions that a rank asks meanwhile; it is called on other threads.
        """
        if not self._channels:  # they have ended, and so does this process
            return Call((), answer)
        call, number = Call(args, answer), next(self._numbers)
        self._calls[number] = call
        for rank, values in args.items():
            try:
                self._channels[rank].send(number, name, values)
            except OSError:
                self._lost(rank)
        return call

    def end(self) -> None:
        """Lets the other ranks end. Later losses of a rank are no error."""
        if os.getpid() != self._process:
            return
        finish_operations()  # they need the other ranks
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            with suppress(OSError):
                channel.send(0, "end", ())
        end_process_group()

    def _read(self, rank: int) -> None:
        channel = self._channels[rank]
        while True:
            try:
                number, kind, value = channel.receive()
            except (EOFError, OSError):
                if self._channels:
                    self._lost(rank)
                return
            call = self._calls[number]
            if kind == QUESTION:
                with suppress(OSError):  # seen by the next ``receive``
                    channel.send(number, "answer", call.answer(rank, value))
            elif kind == FAILING:
                call.failing(value)
            elif call.finish(rank, kind, value):
                del self._calls[number]

    def _lost(self, rank: int) -> NoReturn:
        end_process(
            f"rank {rank} of {self.process.world} (process {self._pids[rank]}) has ended, so this "
            f"run ends. {_RESUME}"
        )


@dataclass
class Processes:
    """Those of torchrun, once ``join`` has joined them."""

    this: ProcessRank | None = None
    followers: Followers | None = None


processes = Processes()


def start_process_group(store: Any, process: ProcessRank) -> None:
    """Starts torch.distributed for tensors of CPUs and, where there are any, of GPUs."""
    import datetime

    import torch
    from torch import distributed

    if distributed.is_initialized():
        return
    # One machine: gloo need not look up the name of the host, which may have no address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=process.rank,
        world_size=process.world,
        timeout=datetime.timedelta(minutes=_COLLECTIVE_MINUTES),
    )


def end_process_group() -> None:
    """Ends what ``start_process_group`` has started."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def in_step(doing: str, raised: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Ends the process at an error in the block: a rank that leaves a collective early would keep
    the others waiting. Errors of the classes ``raised`` are those that every rank raises."""
    try:
        yield
    except raised:
        raise
    except Exception as error:
        # If a rank has ended, its closed socket tells so, and that message is the better one.
        time.sleep(1)
        end_process(f"{doing} failed: {type(error).__name__}: {error}. {_RESUME}")


@contextmanager
def keeping_step(
    doing: str,
    gathers: Gathers,
    expected: Callable[[], Sequence[int]],
    on_error: Callable[[Exception], None] = lambda _: None,
) -> Iterator[None]:
    """Like ``in_step``, but raises an error of the block after the gathers that are left.

    Args:
        doing: What the block does, for the message of the process's end.
        gathers: Those of the sharded base model that the block runs.
        expected: Returns the gathers of the whole block.
        on_error: Called at once; the other ranks may be waiting for a result of this one.
    """
    gathers.start()
    caught: Exception | None = None
    with in_step(doing):
        try:
            yield
        except Exception as error:
            if not gathers.recovers:
                raise
            on_error(error)
            gathers.catch_up(expected())
            caught = error
    if caught is not None:
        raise caught


def end_process(message: str) -> NoReturn:
    """Prints a message and ends this process at once, whatever its threads are waiting for."""
    with suppress(Exception):
        sys.stdout.flush()
        print(f"\ntorchrun: {message}", file=sys.stderr, flush=True)
    os._exit(1)
