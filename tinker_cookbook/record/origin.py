"""What computed a step: versions, device and precision, which tell why a replay differs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tinker_cookbook import __version__
from tinker_cookbook.backends import Connection

ORIGIN_KEY = b"tinker_cookbook.origin"
"""Key of the origin, as JSON, in the metadata of a file of the record."""


def origin_of(connection: Connection) -> dict[str, str]:
    """Returns the versions and the machine of a connection; a server's own are not known."""
    found = {"tinker_cookbook": __version__, "python": platform.python_version()}
    engine: Any = getattr(connection.service, "engine", None)
    if engine is None:
        return found | {"backend": connection.url or "hosted", "tinker": _version("tinker")}
    import torch

    from tinker_cookbook.engine.devices import cpu_threads

    device, dtype = engine.choice.device, engine.choice.dtype
    found |= {name: _version(name) for name in ("torch", "transformers")}
    found |= {"backend": "local", "device": str(device), "dtype": str(dtype).rpartition(".")[2]}
    if device.type == "cuda":
        return found | {"machine": torch.cuda.get_device_name(device)}
    # Kernels depend on the processor's instructions, and sums on the number of threads.
    capability = torch.backends.cpu.get_cpu_capability()
    return found | {"machine": capability, "threads": str(cpu_threads())}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout on the path
        return "unknown"
