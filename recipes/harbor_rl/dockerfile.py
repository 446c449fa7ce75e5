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
    "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK",
)  # fmt: skip
_BASES = ("debian", "ubuntu", "python", "alpine", "busybox", "bash", "scratch")
_APT = re.compile(r"^(?:sudo )?apt(?:-get)?(?: -\S+)* (update|clean|autoremove|install)\b(.*)$")
_CLEANING = re.compile(r"^rm -rf /var/lib/apt/lists/\*?$")
_INSTEAD = "A sandbox_factory with Docker or a cloud can build it"


@dataclass(frozen=True)
class Step:
    """One instruction that changes the files of the environment."""

    instruction: str
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
    """Variables of ENV and ARG."""
    folders: list[str] = field(default_factory=list)
    """Folders that WORKDIR creates."""

    def _follow(self, name: str, rest: str) -> bool:
        """Follows ENV, ARG or WORKDIR; returns False for another instruction."""
        if name in ("ENV", "ARG"):
            self.environment |= _pairs(_expand(rest, self.environment))
        elif name == "WORKDIR":
            folder = posixpath.join(self.workdir, _expand(rest, self.environment))
            self.workdir = posixpath.normpath(folder)
            self.folders.append(self.workdir)
        else:
            return False
        return True


def read_dockerfile(path: Path) -> Dockerfile:
    """Parses a Dockerfile; its folder is the context of COPY.

    Raises:
        ConfigurationError: An instruction that cannot be followed here.
    """
    result, seen_from = Dockerfile(), False
    for name, rest in _instructions(path):
        where = f"{path}: {name} {rest[:100]}"
        if result._follow(name, rest):
            continue
        if name == "FROM" and not seen_from:
            seen_from = True
            image = rest.split()[-1] if rest.startswith("--") else rest.split()[0]
            if image.rpartition("/")[2].partition(":")[0] not in _BASES:
                raise ConfigurationError(
                    f"{where}: expected one of {', '.join(_BASES)}: the local sandbox has this "
                    f"machine's programs, and images of others have their own. {_INSTEAD}"
                )
        elif name in ("COPY", "ADD"):
            rest = _expand(rest, result.environment)
            copies = _copies(path.parent, rest, result.workdir, where)
            result.steps.append(Step(where, copies))
        elif name == "RUN":
            if command := _without_apt(_shell(rest), where):
                variables = tuple(result.environment.items())
                result.steps.append(Step(where, (), command, result.workdir, variables))
        elif name not in _WITHOUT_EFFECT and (name, rest) not in (("USER", "root"), ("USER", "0")):
            raise ConfigurationError(
                f"{where}: the local sandbox follows one FROM, COPY, ADD of local files, RUN, "
                f"WORKDIR, ENV and ARG. {_INSTEAD}"
            )
    return result


def read_workdir(path: Path) -> str:
    """Returns the folder in which commands run, also of a file that cannot be followed here."""
    result = Dockerfile()
    for name, rest in _instructions(path):
        if name == "FROM":
            result = Dockerfile()  # another stage of the build
        result._follow(name, rest)
    return result.workdir


def _instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the rest of each instruction."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\s*\\\s*\n\s*", " ", "\n".join(kept)).splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name.upper(), rest.strip()


def _pairs(rest: str) -> dict[str, str]:
    """Parses ``A=1 B="2 3"`` or the older form ``A 1``."""
    name, _, value = rest.partition(" ")
    if "=" not in name:
        return {name: value} if value else {}
    words = (word.partition("=") for word in shlex.split(rest))
    return {name: value for name, _, value in words}


def _expand(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], name[0]), text)


def _shell(rest: str) -> str:
    """Returns the shell command of RUN, also of its form as a JSON list."""
    rest = re.sub(r"^(--\S+ )+", "", rest)  # mounts and networks of the builder
    return shlex.join(json.loads(rest)) if rest.startswith("[") else rest


def _copies(context: Path, rest: str, workdir: str, where: str) -> tuple[tuple[Path, str], ...]:
    """Returns each file of a COPY with its place."""
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    *sources, target = [word for word in words if not word.startswith("--")]
    place = posixpath.join(workdir, target)
    into = target.endswith("/") or target in (".", "..") or len(sources) > 1
    copies: list[tuple[Path, str]] = []
    for source in sources:
        pattern = source.strip("/") or "."
        matches = [context] if pattern == "." else sorted(context.glob(pattern))
        if "://" in source or not matches:
            raise ConfigurationError(
                f"{where}: there is no such file in {context}, and the local sandbox has no network"
            )
        for match in matches:
            if not match.resolve().is_relative_to(context.resolve()):
                raise ConfigurationError(f"{where}: {source}: leads out of {context}")
            if match.is_file():
                copies.append((match, f"{place}/{match.name}" if into else place))
                continue
            # Docker copies what a folder contains, not the folder.
            for file in sorted(path for path in match.rglob("*") if path.is_file()):
                copies.append((file, f"{place}/{file.relative_to(match).as_posix()}"))
    return tuple((file, posixpath.normpath(end)) for file, end in copies)


def _without_apt(command: str, where: str) -> str:
    """Returns the command without installations of packages that this machine has.

    Raises:
        ConfigurationError: A package is not installed on this machine.
    """
    kept = []
    for part in (one.strip() for one in command.split("&&")):
        found = _APT.match(part)
        if found is None and not _CLEANING.match(part):
            kept.append(part)
        if found is None or found[1] != "install":
            continue
        names = [word for word in shlex.split(found[2]) if not word.startswith("-")]
        missing = [name for name in names if not _is_installed(name.partition("=")[0])]
        if missing:
            raise ConfigurationError(
                f"{where}: needs {', '.join(missing)}, which this machine lacks, and the local "
                f"sandbox has no network. Install them here (apt-get install {' '.join(missing)}). "
                f"{_INSTEAD}"
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
