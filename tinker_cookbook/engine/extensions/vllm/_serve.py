"""Runs vLLM's HTTP server until the process that started it ends.

Run as a script by the Python of an environment with vLLM, which pins other versions of packages
than this package needs. It does not import this package.

python -I _serve.py --model FOLDER --port 8001 …
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time

_POLL_SECONDS = 1.0


def _end_with(parent: int) -> None:
    """Ends this process group once ``parent`` has ended, even by a kill."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    # The server's workers are in the same group. On a GPU they would keep its memory forever.
    os.killpg(0, signal.SIGTERM)
    time.sleep(10 * _POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)


# vLLM's workers import this file again, under another name.
if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
