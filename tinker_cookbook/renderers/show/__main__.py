"""``python -m tinker_cookbook.renderers.show``; see ``command``."""

from __future__ import annotations

import sys

from tinker_cookbook.renderers.show.command import main, with_file_key
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

if __name__ == "__main__":
    sys.argv[1:] = with_file_key(sys.argv[1:])
    run_entrypoint(main)
