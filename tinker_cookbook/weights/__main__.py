"""Entry point of the export commands; ``COMMAND --help`` lists the keys of a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.command_line.subcommands import Subcommand, run_subcommand

_MODULE = "tinker_cookbook.weights.commands"
_CHECKPOINT, _FOLDER = ("model_path",), ("folder",)
_OUT = "LOG_PATH out=…"

COMMANDS = {
    "export": Subcommand(
        _MODULE, "ExportSettings", "export", _CHECKPOINT,
        "writes the adapter for PEFT and vLLM", _OUT,
    ),
    "merge": Subcommand(
        _MODULE, "MergeSettings", "merge", _CHECKPOINT,
        "writes base model and adapter as one model", _OUT,
    ),
    "gguf": Subcommand(
        "tinker_cookbook.weights.gguf", "GGUFSettings", "export_gguf", _CHECKPOINT,
        "writes GGUF files for llama.cpp and Ollama", _OUT,
    ),
    "card": Subcommand(
        _MODULE, "CardSettings", "card", _FOLDER,
        "writes the model card of an export", "my-adapter",
    ),
    "publish": Subcommand(
        _MODULE, "PublishSettings", "publish", _FOLDER,
        "uploads an export to the Hugging Face Hub", "my-adapter repo_id=user/name",
    ),
}  # fmt: skip


def main(argv: Sequence[str]) -> Any:
    """Runs the command given by the first argument."""
    return run_subcommand("tinker_cookbook.weights", COMMANDS, argv)


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
