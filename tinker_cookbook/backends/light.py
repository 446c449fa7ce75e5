"""Programs that leave all computing to a server, and so need no torch."""

from __future__ import annotations

from tinker_cookbook import _process
from tinker_cookbook.backends.connect import check_backend


def leave_torch_out(backend: str, base_url: str | None = None) -> bool:
    """Keeps torch out of this process where the backend is remote; to be called before ``connect``.

    The SDK and transformers import it wherever it is installed, and do without it where it is not:
    a client takes 280 MB with it and 75 MB without, and begins sooner. For programs that hand
    arrays to the SDK and no tensors; the weights that renderers give are numpy arrays then. Nothing
    changes where torch is loaded already or the backend is the local engine.

    Returns:
        Whether it is left out.
    """
    if check_backend(backend, base_url)[0] == "tinker":
        _process.leave_torch_out()
    return _process.torch_is_left_out()
