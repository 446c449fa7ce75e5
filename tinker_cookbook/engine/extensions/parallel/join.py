"""Joins the processes that torchrun has started: rank 0 leads, the other ranks serve its engine.

Imports neither torch nor torch.distributed unless torchrun has started this process.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, NoReturn

from tinker_cookbook.engine.extensions.parallel.launch import Followers, ProcessRank, processes
from tinker_cookbook.engine.extensions.parallel.messages import Channel
from tinker_cookbook.engine.processes import factory
from tinker_cookbook.exceptions import ConfigurationError

_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_VARIABLES += ("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_VARIABLES += ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")


def join() -> None:
    """Joins the processes of torchrun; see ``engine.processes.join``."""
    process = ProcessRank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    here, store = int(os.environ["LOCAL_WORLD_SIZE"]), None
    if 1 < process.world == here:
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://"))
    # The children of this process are no ranks.
    for name in _VARIABLES:
        os.environ.pop(name, None)
    processes.this = process
    if here != process.world:
        raise ConfigurationError(
            f"torchrun: got {process.world} processes on several machines, expected those of one; "
            "leave --nnodes out, or train on a cluster through backend=URL"
        )
    if process.world == 1:
        return
    # Loads torch.
    from tinker_cookbook.engine.extensions.parallel.processes import JoinedProcesses

    factory.make = JoinedProcesses
    if process.rank == 0:
        processes.followers = _accept(store, process)
        atexit.register(processes.followers.end)
    else:
        _follow(store, process)


def _accept(store: Any, process: ProcessRank) -> Followers:
    from multiprocessing.connection import Listener

    channels, pids = dict[int, Channel](), dict[int, int]()
    # A socket in a folder that only this user can enter.
    with Listener(family="AF_UNIX", backlog=process.world) as listener:
        store.set("address", f"{os.getpid()} {listener.address}")
        for _ in range(process.world - 1):
            channel = Channel(listener.accept())
            rank, pid = channel.receive()
            channels[rank], pids[rank] = channel, pid
    return Followers(dict(sorted(channels.items())), pids, store)


def _follow(store: Any, process: ProcessRank) -> NoReturn:
    from multiprocessing.connection import Client

    from tinker_cookbook.engine.extensions.parallel.follower import Follower

    leader, _, address = store.get("address").decode().partition(" ")
    channel = Channel(Client(address, family="AF_UNIX"))
    channel.send(process.rank, os.getpid())
    Follower(channel, int(leader), store, process).serve()
