"""Command line of the server.

    python -m tinker_cookbook.server model_name=Qwen/Qwen3-0.6B
    python -m tinker_cookbook.server model_name=Qwen/Qwen3-0.6B port=8001 owners=ann,bob

The first start prints the API key.
"""

import logging
import os
import sys

from tinker_cookbook.server.run import Config, main, use_compiled_loop
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

__all__ = ["Config", "main"]

if __name__ == "__main__":
    use_compiled_loop()
    run_entrypoint(main)
    # Sessions, engine and files are closed. os._exit skips the unloading of the modules of torch,
    # which takes seconds on a busy machine.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
