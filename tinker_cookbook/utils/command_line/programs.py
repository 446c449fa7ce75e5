"""Finds the programs of this package and of the recipes without importing them."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import select
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tinker_cookbook
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.utils.imports import OFFICIAL, alias_package

LIBRARY = "tinker_cookbook"
RECIPES = "recipes"
_INSTALLED_RECIPES = f"{LIBRARY}.{RECIPES}"
# A recipe's name in a command, without the part that only an installed package needs.
_RECIPE_NAME = re.compile(rf"(?<![\w./]){RECIPES}\.(?=[a-z…])")
# Marks a program for users. Other files with a ``__main__`` block are started by programs.
_STARTS = re.compile(r"^ +run_entrypoint\(\w+\)$", re.MULTILINE)
_MAIN = "__main__"
_VERSIONS_OF = ("tinker", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Program:
    """Name of a module that ``python -m`` runs, and the first sentence of its docstring."""

    name: str
    summary: str


def recipes_package() -> str:
    """Returns the name by which ``python -m`` finds the recipes.

    It is ``recipes`` in the folder of the checkout, and ``tinker_cookbook.recipes`` elsewhere.
    """
    # Not find_spec of importlib.util, which also finds the alias of ``alias_recipes``.
    spec = importlib.machinery.PathFinder.find_spec(RECIPES)
    folders = spec.submodule_search_locations if spec is not None else None
    # The working folder may have a folder ``recipes`` of its own.
    ours = Path(tinker_cookbook.__path__[0], RECIPES).resolve()
    here = any(Path(folder).resolve() == ours for folder in folders or ())
    return RECIPES if here else _INSTALLED_RECIPES


def alias_recipes() -> None:
    """Lets arguments name the classes of recipes as ``recipes.NAME`` in every folder."""
    if importlib.util.find_spec(RECIPES) is None:
        alias_package(RECIPES, _INSTALLED_RECIPES)


def with_recipes_of_folder(text: str) -> str:
    """Returns a text whose commands name the recipes such that they run in this folder."""
    return _RECIPE_NAME.sub(f"{recipes_package()}.", text)


def find_programs(package: str) -> list[Program]:
    """Returns the programs of a package and its subpackages; none if it is not installed."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    found = [program for folder in folders or () for program in _programs_in(Path(folder), package)]
    return sorted(found, key=lambda program: program.name)


def is_program(module: str) -> bool:
    """Returns whether ``python -m`` can run a module of this package or of the recipes."""
    module = f"{LIBRARY}.{module.removeprefix(f'{LIBRARY}.')}"
    _, *parts = importlib.import_module(OFFICIAL).MODULES.get(module, module).split(".")
    folder = Path(tinker_cookbook.__path__[0], *parts)
    if (folder / f"{_MAIN}.py").is_file():
        return True
    file = folder.with_name(f"{folder.name}.py")
    return file.is_file() and bool(_STARTS.search(file.read_text(encoding="utf-8")))


def _programs_in(folder: Path, package: str) -> Iterator[Program]:
    # In a checkout the tutorials are behind a link, which rglob does not follow.
    for file in {*folder.rglob("*.py"), *folder.glob("tutorials/*.py")}:
        parts = file.relative_to(folder).with_suffix("").parts
        is_main = parts[-1] == _MAIN
        # The program that prints this list, and second names of programs.
        if (is_main and len(parts) == 1) or parts[0] == "official":
            continue
        # Read the files instead of importing them: importing every recipe would take seconds.
        text = file.read_text(encoding="utf-8")
        if not is_main and not _STARTS.search(text):
            continue
        name = ".".join((package, *(parts[:-1] if is_main else parts)))
        summary = _first_sentence(text)
        if is_main:  # the package's docstring describes it
            package_file = file.with_name("__init__.py")
            about = package_file.read_text(encoding="utf-8") if package_file.exists() else ""
            summary = _first_sentence(about) or summary
        yield Program(name, summary)


def _first_sentence(source: str) -> str:
    """Returns the first sentence of a module's docstring."""
    about = ast.get_docstring(ast.parse(source)) or ""
    paragraph = " ".join(about.partition("\n\n")[0].split())
    # The first column already shows the command.
    sentence = re.sub(r": ``python -m [^`]*``", "", paragraph.partition(". ")[0])
    return sentence.rstrip(".:").replace("``", "")


def listing(packages: Sequence[str], command: str = "") -> str:
    """Returns a line for each program of the packages, and how to start one.

    ``command`` is a console command, which takes the short names; default: ``python -m``.
    """
    # By name: an installed package contains the recipes.
    programs = {p.name: p for package in packages for p in find_programs(package)}.values()
    named = {short_name(p.name) if command else p.name: p.summary for p in programs}
    named.pop("--help", None)  # the program that prints this list
    width = max(map(len, named), default=0)
    start = command or "python -m"
    lines = [f"{start} PROGRAM [key=value ...]      (--help lists a program's keys)", ""]
    lines += [f"  {name:{width}}  {summary}" for name, summary in named.items()]
    if command:
        lines += ["", f"{command} completion bash|zsh|fish prints a script for completion by TAB"]
    return "\n".join(lines)


def run_listing(packages: Sequence[str], arguments: Sequence[str], command: str = "") -> None:
    """Prints the programs of the packages (see ``listing``), or the version with ``--version``.

    Raises:
        ConfigurationError: Another argument was given; names the nearest program.
    """
    others = [word for word in arguments if word not in ("--help", "-h", "--version")]
    if others:
        start = " ".join(["python -m", module_of(others[0]), *others[1:]])
        raise ConfigurationError(
            f"got {others[0]!r}, expected no argument here; start the program with: {start}"
        )
    print_whole(version_line() if "--version" in arguments else listing(packages, command))


def module_of(name: str) -> str:
    """Returns the module of a program's name, with or without its package.

    Raises:
        ConfigurationError: There is none; names the nearest one.
    """
    recipes = recipes_package()
    short = name.removeprefix(f"{LIBRARY}.").removeprefix(f"{RECIPES}.")
    # Of a short name a recipe comes first.
    full = [name] if name.startswith(f"{LIBRARY}.") else []
    for module in (*full, f"{recipes}.{short}", f"{LIBRARY}.{short}"):
        if is_program(module):
            return module
    programs = [*find_programs(recipes), *find_programs(LIBRARY)]
    known = list(dict.fromkeys(short_name(program.name) for program in programs))
    # A package whose programs are its modules, such as math_rl with math_rl.train.
    inside = [one for one in known if one.startswith(f"{short}.")]
    meant = f"; did you mean {' or '.join(inside)}?" if inside else nearest(short, known)
    raise ConfigurationError(
        f"got {name!r}, which is no program{meant} (without arguments, all programs are listed)"
    )


def short_name(module: str) -> str:
    """Returns the name of a program for the console command."""
    module = module.removesuffix(".__main__")
    short = module.removeprefix(f"{LIBRARY}.").removeprefix(f"{RECIPES}.")
    if short in (LIBRARY, RECIPES):
        return "--help"
    is_recipe = f"{RECIPES}." in module
    return short if is_recipe or not is_program(f"{LIBRARY}.{RECIPES}.{short}") else module


def print_whole(text: str) -> None:
    """Prints a text; the reader may close the pipe early (``… | head``)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        stdout_is_closed()


def stdout_is_closed() -> bool:
    """Returns whether the reader of standard output has gone; further output is then dropped."""
    if not hasattr(select, "poll"):  # Windows
        return False
    # The error may be of another pipe, and flushing again need not raise it again.
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if closed:
        # Otherwise Python reports the error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def running_command() -> str:
    """Returns the command of the running program, such as ``python -m recipes.sl_basic``."""
    spec = getattr(sys.modules[_MAIN], "__spec__", None)
    if spec is None:
        return f"python {Path(sys.argv[0]).name}"
    # `python -m package` runs package.__main__, which users never type.
    return f"python -m {spec.name.removesuffix(f'.{_MAIN}')}"


def version_line() -> str:
    """Returns the versions of this package, Python, and the libraries that results depend on."""
    versions = [f"{name} {_version(name)}" for name in _VERSIONS_OF]
    python = f"Python {platform.python_version()}"
    return f"{LIBRARY} {tinker_cookbook.__version__} ({', '.join([python, *versions])})"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def program_command(module: str, *words: str) -> str:
    """Returns the command line that starts a module of this package or of the recipes."""
    return with_recipes_of_folder(shlex.join([_python(), "-m", module, *words]))


def started_as() -> tuple[list[str], list[str]] | None:
    """Returns the words that start the running program, and its arguments; None for a script."""
    spec = getattr(sys.modules[_MAIN], "__spec__", None)
    # These are started with -m too, and have no keys of a run.
    notebooks = ("ipykernel_launcher", f"{LIBRARY}.tutorials.{_MAIN}", f"pytest.{_MAIN}")
    if spec is None or spec.name in notebooks:
        return None
    return [_python(), "-m", spec.name.removesuffix(f".{_MAIN}")], sys.argv[1:]


def _python() -> str:
    # The same interpreter: another "python" may not have the package.
    return getattr(sys, "orig_argv", ["python"])[0]
