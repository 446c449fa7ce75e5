"""Completion of programs and keys in a shell, for the console command ``tinker-cookbook``.

    tinker-cookbook completion bash > ~/.tinker_completion    # in ~/.bashrc: source that file
    tinker-cookbook completion zsh > ~/.tinker_completion    # in ~/.zshrc: source that file
    tinker-cookbook completion fish > ~/.config/fish/completions/tinker-cookbook.fish

The script contains all names, because starting Python at each TAB would take a second. Write it
again after an update of the package.
"""

from __future__ import annotations

import importlib

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.command_line.config_file import CONFIG
from tinker_cookbook.utils.command_line.entrypoint import config_class_of
from tinker_cookbook.utils.command_line.keys import keys_of
from tinker_cookbook.utils.command_line.programs import (
    LIBRARY,
    find_programs,
    recipes_package,
    short_name,
)

# After "key=", each shell completes file names.
_SCRIPTS = {
    "bash": (
        """_tinker_cookbook() {
  local cur=${COMP_WORDS[COMP_CWORD]} words=
  [[ $cur == '=' || ${COMP_WORDS[COMP_CWORD-1]} == '=' ]] && return
  if ((COMP_CWORD == 1)); then words='%s'; else
    case ${COMP_WORDS[1]} in
%s
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _tinker_cookbook tinker-cookbook""",
        "      {}) words='{}' ;;",
    ),
    "zsh": (
        """_tinker_cookbook() {
  if ((CURRENT == 2)); then compadd -- %s; return; fi
  if compset -P '*='; then _files; return; fi
  case $words[2] in
%s
  esac
}
((${+functions[compdef]})) || { autoload -U compinit && compinit; }
compdef _tinker_cookbook tinker-cookbook""",
        "    {}) compadd -S '' -- {} ;;",
    ),
    "fish": (
        "complete -c tinker-cookbook -f -n __fish_use_subcommand -a '%s'\n%s",
        "complete -c tinker-cookbook -n '__fish_seen_subcommand_from {}' -a '{}'",
    ),
}


def completion(shell: str) -> str:
    """Returns the script that completes programs and keys in a shell: bash, zsh or fish.

    Raises:
        ConfigurationError: Another shell.
    """
    if shell not in _SCRIPTS:
        raise ConfigurationError(
            f"completion: got {shell!r}, expected one of {', '.join(_SCRIPTS)}, as in: "
            "tinker-cookbook completion bash > ~/.tinker_completion, and in ~/.bashrc: "
            "source ~/.tinker_completion"
        )
    script, line = _SCRIPTS[shell]
    programs = [*find_programs(recipes_package()), *find_programs(LIBRARY)]
    keys = {short_name(program.name): _keys(program.name) for program in programs}
    lines = [line.format(name, " ".join(words)) for name, words in keys.items() if words]
    return script % (" ".join(keys), "\n".join(lines))


def _keys(module: str) -> list[str]:
    """Returns the keys of a program, such as ``max_steps=``; none if it has subcommands."""
    for name in (module, f"{module}.__main__"):
        try:
            found = config_class_of(getattr(importlib.import_module(name), "main", None))
        except (ImportError, ConfigurationError):  # it needs an extra that is not installed
            continue
        if found is not None:
            return sorted(f"{name}=" for name in {CONFIG, *(key.name for key in keys_of(found))})
    return []
