"""Programs with several commands: ``python -m PROGRAM COMMAND [NAME ...] [key=value ...]``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.utils.command_line.arguments import HELP, VERSION, parse_arguments
from tinker_cookbook.utils.command_line.help import help_text
from tinker_cookbook.utils.command_line.programs import (
    print_whole,
    version_line,
    with_recipes_of_folder,
)


@dataclass(frozen=True)
class Subcommand:
    """A command. Its module is imported when it runs.

    Attributes:
        module: Module with the settings class and the function.
        settings: Name of the chz class of its keys.
        function: Name of the function that gets the settings.
        names: Keys of the arguments that may omit their key, in order.
        about: Description for the list of commands.
        example: Arguments for the help text.
    """

    module: str
    settings: str
    function: str
    names: tuple[str, ...]
    about: str
    example: str = ""


def run_subcommand(
    program: str, commands: Mapping[str, Subcommand], argv: Sequence[str], default: str = ""
) -> Any:
    """Runs the command that the first argument names, and returns its result.

    Args:
        program: Name of the module that ``python -m`` runs.
        commands: The commands by name.
        argv: The arguments.
        default: Command if the first argument is no word; without it the commands are listed.
    """
    words = list(argv)
    if words[:1] == [VERSION]:
        print_whole(version_line())
        return None
    if (words[:1] and words[0] in HELP) or not (words or default):
        width = max(map(len, commands))
        lines = [f"python -m {program} COMMAND [NAME ...] [key=value ...]", ""]
        lines += [f"  {name:{width}}  {one.about}" for name, one in commands.items()]
        print_whole(
            with_recipes_of_folder("\n".join([*lines, "", "COMMAND --help lists a command's keys"]))
        )
        return None
    name = default if not words or (default and "=" in words[0]) else words.pop(0)
    if name not in commands:
        raise ConfigurationError(
            f"command: got {name!r}, expected one of {', '.join(commands)}"
            f"{nearest_sentence(name, commands)}"
        )
    chosen = commands[name]
    words = with_keys(words, chosen.names)
    module = importlib.import_module(chosen.module)
    settings, run = getattr(module, chosen.settings), getattr(module, chosen.function)
    if any(word in HELP for word in words):
        command = f"python -m {program} {name}"
        about = f"{run.__doc__}\n\n{command} {chosen.example}"
        print_whole(with_recipes_of_folder(help_text(settings, command, about)))
        return None
    return run(parse_arguments(settings, words))


def with_keys(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the arguments with the keys of those that omit them."""
    left = [name for name in names if not any(word.startswith(f"{name}=") for word in words)]
    keyed = []
    for word in words:
        # A path may contain "=": folders of a sweep are named after their settings.
        is_key = word.partition("=")[0].isidentifier() and "=" in word
        is_name = word.startswith("tinker://") or not (is_key or word.startswith("-"))
        keyed.append(f"{left.pop(0)}={word}" if is_name and left else word)
    return keyed
