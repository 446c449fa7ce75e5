"""Command line of the view of a conversation.

    python -m tinker_cookbook.renderers.show model_name=Qwen/Qwen3-0.6B
    python -m tinker_cookbook.renderers.show model_name=… file=my.jsonl

Without ``file`` it shows a built-in conversation.
"""

from __future__ import annotations

import sys

from tinker_cookbook.renderers.show.command import main, with_file_key
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

if __name__ == "__main__":
    sys.argv[1:] = with_file_key(sys.argv[1:])
    run_entrypoint(main)
