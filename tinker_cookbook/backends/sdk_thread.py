"""Ends the thread of the official SDK before the interpreter goes.

The SDK sends its requests from a daemon thread. When Python exits it unwinds such a thread at the
point where it next asks for the interpreter; one that is inside pydantic's compiled code just then
brings the process down ("FATAL: exception not rethrown", status -6), and a script that launches
runs takes one that did all it should for a failed one.
"""

from __future__ import annotations

import atexit
import sys

PATIENCE_SECONDS = 5.0
"""How long the callback or request that the thread is in may take."""


def end_at_exit() -> None:
    """The thread ends when the program does, after all exit handlers registered later."""
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    # The SDK has no call for it; one without these names keeps its thread, and the risk.
    holders = sys.modules.get("tinker.lib.internal_client_holder")
    running = getattr(holders, "_internal_client_holder_thread_singleton", None)
    loop, thread = getattr(running, "_loop", None), getattr(running, "_thread", None)
    if loop is not None and thread is not None and thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_SECONDS)
