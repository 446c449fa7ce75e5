"""Entry point of the export commands; ``COMMAND --help`` lists the keys of a command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.utils.command_line.arguments import HELP, VERSION, parse_arguments
from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.utils.command_line.help import help_text
from tinker_cookbook.utils.command_line.programs import print_whole, version_line

# Command -> module with its settings class and function, the key of the argument that may omit its
# key, and a description. A module is imported when its command runs.
COMMANDS: dict[str, tuple[str, str, str, str, str]] = {
    "export": (
        "tinker_cookbook.weights.commands", "ExportSettings", "export", "model_path",
        "writes the adapter for PEFT and vLLM",
    ),
    "merge": (
        "tinker_cookbook.weights.commands", "MergeSettings", "merge", "model_path",
        "writes base model and adapter as one model",
    ),
    "gguf": (
        "tinker_cookbook.weights.gguf", "GGUFSettings", "export_gguf", "model_path",
        "writes GGUF files for llama.cpp and Ollama",
    ),
    "card": (
        "tinker_cookbook.weights.commands", "CardSettings", "card", "folder",
        "writes the model card of an export",
    ),
    "publish": (
        "tinker_cookbook.weights.commands", "PublishSettings", "publish", "folder",
        "uploads an export to the Hugging Face Hub",
    ),
}  # fmt: skip

_PATHS = {"model_path": "tinker://RUN/sampler_weights/final", "folder": "my-adapter"}


def main(argv: Sequence[str]) -> Any:
    """Runs the command given by the first argument."""
    if not argv or argv[0] in HELP:
        lines = ["python -m tinker_cookbook.weights COMMAND PATH [key=value ...]", ""]
        lines += [f"  {name:8} {about}" for name, (*_, about) in COMMANDS.items()]
        print_whole("\n".join([*lines, "", "COMMAND --help lists the keys of a command"]))
        return None
    if argv[0] == VERSION:
        print_whole(version_line())
        return None
    name, *words = argv
    if name not in COMMANDS:
        raise ConfigurationError(
            f"command: got {name!r}, expected one of {', '.join(COMMANDS)}"
            f"{nearest_sentence(name, COMMANDS)}"
        )
    module_name, settings_name, function_name, positional, _ = COMMANDS[name]
    module = importlib.import_module(module_name)
    # The first argument that is not key=value is the path.
    for at, word in enumerate(words):
        if word.startswith("tinker://") or ("=" not in word and not word.startswith("-")):
            words[at] = f"{positional}={word}"
            break
    settings_class, run = getattr(module, settings_name), getattr(module, function_name)
    if any(word in HELP for word in words):
        command = f"python -m tinker_cookbook.weights {name}"
        example = f"{command} {_PATHS[positional]}" + (" out=…" if positional != "folder" else "")
        print_whole(help_text(settings_class, command, f"{run.__doc__}\n\n{example}"))
        return None
    return run(parse_arguments(settings_class, words))


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
