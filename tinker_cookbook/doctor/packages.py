"""Optional packages: which extras are installed, and the command that installs one."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from tinker_cookbook.exceptions import install_command

DISTRIBUTION = "tinker_cookbook"
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[([^\]]*)\])?")
_USES = {
    "capture": "recording of samples",
    "demo": "the demo model's 4-bit copy",
    "eval": "benchmarks: grading of mathematics, IFEval",
    "gguf": "export for llama.cpp and Ollama",
    "gpu": "fused kernels for NVIDIA GPUs",
    "images": "images in prompts",
    "inspect": "evaluations with Inspect AI",
    "litellm": "sampling through LiteLLM",
    "llama-cpp": "check of a GGUF export in llama.cpp",
    "math": "grading of mathematical answers",
    "mcp": "tools from MCP servers",
    "modal": "sandboxes on Modal",
    "multiplayer-rl": "games of TextArena",
    "plot": "curves of a run",
    "quantized": "4- and 8-bit base models",
    "rl": "environments of Reasoning Gym",
    "search": "search over documents (BM25)",
    "server": "the HTTP server",
    "structured": "output that follows a JSON schema",
    "tml": "the renderer of Inkling, tokenizers without the Hub",
    "vector-search": "search in a Chroma server",
    "verifiers": "environments of verifiers",
    "verifiers-legacy": "environments of older versions of verifiers",
}


@dataclass(frozen=True)
class Extra:
    """An extra of this package, its missing packages, and the command that installs it."""

    name: str
    use: str
    missing: tuple[str, ...]
    command: str

    @property
    def installed(self) -> bool:
        """Whether all its packages are installed."""
        return not self.missing


def find_extras() -> list[Extra]:
    """Returns the extras that the installed package declares, without importing anything.

    Empty if the package runs from a folder without being installed.
    """
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    packages: dict[str, set[str]] = {}
    for line in requirements:
        requirement, _, marker = line.partition(";")
        extra, found = _EXTRA.search(marker), _NAME.match(requirement)
        # Requirements without an extra are always installed, and developers' tools do not count.
        if extra is None or found is None or extra[1] == "dev":
            continue
        # An extra that includes others names this package with them in brackets.
        names = re.split(r"\s*,\s*", found[2]) if found[2] and found[1] == DISTRIBUTION else []
        packages.setdefault(extra[1], set()).update(f"[{name}]" for name in names)
        if not names:
            packages[extra[1]].add(found[1])

    def missing(extra: str) -> set[str]:
        own = {p for p in packages[extra] if not p.startswith("[") and version_of(p) is None}
        return own.union(*(missing(p[1:-1]) for p in packages[extra] if p.startswith("[")))

    return [
        Extra(name, _USES.get(name, ""), tuple(sorted(missing(name))), install_command(name))
        for name in sorted(packages)
    ]


def version_of(package: str) -> str | None:
    """Returns the installed version of a package, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
