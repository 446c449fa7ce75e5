"""Reads the Dockerfile instructions that the local sandbox supports: FROM, COPY, RUN, WORKDIR, ENV.

The sandbox has the programs of this machine and no network, so the image of ``FROM`` is not pulled.
``RUN`` commands run in the sandbox. Packages that ``apt-get`` would install must be installed on
this machine.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tinker_cookbook.exceptions import ConfigurationError

# Instructions about containers that start, which no task of a terminal needs.
_WITHOUT_EFFECT = (
    "CMD",
    "ENTRYPOINT",
    "EXPOSE",
    "LABEL",
    "MAINTAINER",
    "STOPSIGNAL",
    "HEALTHCHECK",
)
_BASES = ("debian", "ubuntu", "python", "alpine", "busybox", "bash", "scratch")
_APT = re.compile(r"^(?:sudo )?apt(?:-get)?(?: -\S+)* (update|clean|autoremove|install)\b(.*)$")
_CLEANING = re.compile(r"^rm -rf /var/lib/apt/lists/\*?$")


@dataclass(frozen=True)
class Step:
    """One instruction that changes the files of the environment."""

    line: int
    copies: tuple[tuple[Path, str], ...] = ()
    """Files of the context and their places in the sandbox."""
    command: str | None = None
    workdir: str = "/"
    environment: tuple[tuple[str, str], ...] = ()


@dataclass
class Dockerfile:
    """Steps of an environment, and where and with which variables commands run in it."""

    steps: list[Step] = field(default_factory=list)
    workdir: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    """Folders that WORKDIR creates."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Variables of ARG, which only the build has."""

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the build."""
        return {**self.arguments, **self.environment}

    def _follow(self, name: str, rest: str, where: str) -> bool:
        """Follows ENV, ARG or WORKDIR; returns False for another instruction."""
        if name in ("ENV", "ARG"):
            values = _pairs(_expand(rest, self.variables), where)
            (self.environment if name == "ENV" else self.arguments).update(values)
        elif name == "WORKDIR":
            folder = _expand(rest, self.variables)
            self.workdir = posixpath.normpath(posixpath.join(self.workdir, folder))
            self.folders.append(self.workdir)
        else:
            return False
        return True


def read_dockerfile(path: Path) -> Dockerfile:
    """Parses a Dockerfile; its folder is the context of COPY.

    Raises:
        ConfigurationError: An instruction that cannot be followed here, with its line.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file; a task's environment needs one")
    result, seen_from = Dockerfile(), False
    for number, name, rest in _instructions(path):
        where = f"{path}, line {number}"
        if result._follow(name, rest, where):
            continue
        if name == "FROM":
            if seen_from:
                raise ConfigurationError(f"{where}: builds of several stages are not supported")
            seen_from = True
            _check_base(rest, where)
        elif name in ("COPY", "ADD"):
            rest = _expand(rest, result.variables)
            copies = _copies(path.parent, rest, result.workdir, where)
            result.steps.append(Step(number, copies=copies))
        elif name == "RUN":
            command = _shell(rest, where)
            command = _without_apt(command, where)
            if command:
                variables = tuple(result.variables.items())
                step = Step(number, command=command, workdir=result.workdir, environment=variables)
                result.steps.append(step)
        elif name == "USER" and rest in ("root", "0"):
            continue
        elif name not in _WITHOUT_EFFECT:
            raise ConfigurationError(
                f"{where}: got {name}, expected FROM, COPY, ADD of local files, RUN, WORKDIR, ENV "
                "or ARG; the local sandbox follows no other instruction. A sandbox_factory with "
                "Docker or a cloud can build it"
            )
    if not seen_from:
        raise ConfigurationError(f"{path}: there is no FROM")
    return result


def read_workdir(path: Path) -> str:
    """Returns the folder in which commands run, also if the local sandbox cannot follow the file.

    Raises:
        ConfigurationError: The values of a variable cannot be read.
    """
    result = Dockerfile()
    for number, name, rest in _instructions(path):
        if name == "FROM":
            result = Dockerfile()  # another stage of the build
        result._follow(name, rest, f"{path}, line {number}")
    return result.workdir


def _instructions(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields the line number, the name and the rest of each instruction."""
    for number, line in _joined_lines(path.read_text(encoding="utf-8")):
        name, _, rest = line.partition(" ")
        yield number, name.upper(), rest.strip()


def _joined_lines(text: str) -> list[tuple[int, str]]:
    """Returns the instructions with the numbers of their first lines."""
    found: list[tuple[int, str]] = []
    continued: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if continued else number
        if line.rstrip().endswith("\\"):
            continued.append(line.rstrip()[:-1])
            continue
        found.append((first, " ".join(part.strip() for part in [*continued, line])))
        continued = []
    if continued:
        found.append((first, " ".join(part.strip() for part in continued)))
    return found


def _check_base(rest: str, where: str) -> None:
    words = [word for word in rest.split() if not word.startswith("--")]
    image = words[0].rpartition("/")[2].partition(":")[0] if words else ""
    if image not in _BASES:
        raise ConfigurationError(
            f"{where}: got FROM {rest}, expected one of {', '.join(_BASES)}: the local sandbox has "
            "this machine's programs, and images of others have their own. A sandbox_factory with "
            "Docker or a cloud can use it"
        )


def _pairs(rest: str, where: str) -> dict[str, str]:
    """Parses ``A=1 B="2 3"`` or the older form ``A 1``."""
    name, _, value = rest.partition(" ")
    if "=" not in name:
        return {name: value.strip()} if value else {}
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def _expand(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], name[0]), text)


def _shell(rest: str, where: str) -> str:
    """Returns the shell command of RUN, also of its form as a JSON list."""
    words = rest.split()
    while words and words[0].startswith("--"):
        words.pop(0)  # mounts and networks of the builder
        rest = rest.partition(" ")[2].lstrip()
    if not rest.startswith("["):
        return rest
    try:
        return shlex.join(json.loads(rest))
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{where}: RUN has a list that is no JSON: {error}") from error


def _copies(context: Path, rest: str, workdir: str, where: str) -> tuple[tuple[Path, str], ...]:
    """Returns each file of a COPY with its place."""
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    words = [word for word in words if not word.startswith("--")]
    if len(words) < 2:
        raise ConfigurationError(f"{where}: COPY needs a source and a destination")
    *sources, target = words
    place = posixpath.join(workdir, target)
    into = target.endswith("/") or target in (".", "..") or len(sources) > 1
    copies: list[tuple[Path, str]] = []
    for source in sources:
        if "://" in source:
            raise ConfigurationError(f"{where}: {source}: the local sandbox has no network")
        pattern = source.lstrip("/") or "."
        matches = [context] if pattern in (".", "./") else sorted(context.glob(pattern))
        if not matches:
            raise ConfigurationError(f"{where}: {source}: there is no such file in {context}")
        for match in matches:
            if not match.resolve().is_relative_to(context.resolve()):
                raise ConfigurationError(f"{where}: {source}: leads out of {context}")
            if match.is_file():
                end = posixpath.join(place, match.name) if into or len(matches) > 1 else place
                copies.append((match, posixpath.normpath(end)))
                continue
            # Docker copies what a folder contains, not the folder.
            for file in sorted(path for path in match.rglob("*") if path.is_file()):
                relative = file.relative_to(match).as_posix()
                copies.append((file, posixpath.normpath(posixpath.join(place, relative))))
    return tuple(copies)


def _without_apt(command: str, where: str) -> str:
    """Returns the command without installations of packages that this machine has.

    Raises:
        ConfigurationError: A package is not installed on this machine.
    """
    kept = []
    for part in (one.strip() for one in command.split("&&")):
        if _CLEANING.match(part):
            continue
        found = _APT.match(part)
        if found is None:
            kept.append(part)
            continue
        if found[1] != "install":
            continue
        names = [word for word in shlex.split(found[2]) if not word.startswith("-")]
        missing = [name for name in names if not _is_installed(name.partition("=")[0])]
        if missing:
            raise ConfigurationError(
                f"{where}: needs {', '.join(missing)}, which this machine lacks; the local sandbox "
                f"has this machine's programs and no network. Install them here (apt-get install "
                f"{' '.join(missing)}), or use a sandbox_factory with Docker or a cloud"
            )
    return " && ".join(kept)


@lru_cache(maxsize=512)
def _is_installed(package: str) -> bool:
    try:
        query = ["dpkg-query", "-W", "-f", "${Status}", package]
        found = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return False  # not a Debian system
    return found.stdout.endswith(" installed")
