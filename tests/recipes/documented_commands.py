"""Finds the commands and Python examples of README and docs."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from recipe_runs import REPO

from tinker_cookbook.utils.command_line.programs import module_of

# Programs that need a network, another package, or the whole test suite; CI runs `make test-all`.
NOT_RUN = (
    "git clone",
    "cd ",
    ". ",
    "make demo",
    "make test",
    "make check",
    "make install",
    "pip ",
    "tar ",
    "tinker-cookbook completion",  # tests/unit/utils/test_programs.py
    "python -m venv",
    "export ",
    "mkdir ",
    "done",
    "wait",
    "python tests/conformance/official_cookbook.py",
    "python -m tests.conformance.compatibility",
    "python -m recipes.verifiers_rl",  # tests/conformance/test_verifiers.py
    "python -m recipes.harbor_rl",  # tests/recipes/test_harbor.py
    "python -m pytest",
    "python -m tinker_cookbook.eval.run_inspect_evals",
    "inspect ",
    "lm_eval ",
    "llama-server ",
    "ollama ",
    "python -m recipes.search_tool.train dataset=search_r1 chroma_host",
    "python -m recipes.multiplayer_rl.text_arena",  # in test_text_arena_recipe.py
    "python -m recipes.chat_sl.sweep",  # in test_chat_sl_sweep.py
    "python -m recipes.preference.rlhf.rlhf_pipeline",  # in test_rlhf.py
    "python -m recipes.research.",  # in test_research_tasks.py
    "python -m recipes.prompt_distillation.create_data",  # in test_prompt_distillation.py
    "torchrun ",  # tests/unit/engine/test_data_parallel.py
    "python -m benchmarks.gpu",
    "vllm ",
    "docker ",
    "sqlite3 ",
    "claude",
    "python -m tinker_cookbook.capture.proxy",  # tests/unit/capture
    "vllm-env/",
    "python -m tinker_cookbook.view",  # tests/unit/view
    "python -m tinker_cookbook.replay",  # tests/unit/rl/test_replay.py
    "python -m tinker_cookbook.fork",
    "pytest test_episode.py",
    "duckdb ",
    "python -m tinker_cookbook.weights gguf",
    "python -m tinker_cookbook.weights publish",
)
# Settings of programs that need vLLM or another server: tests/unit/engine/test_vllm_sampler.py,
# tests/unit/backends/test_server_needs.py. Those with images need a model that sees:
# tests/unit/supervised/test_image_rows.py, tests/unit/server/openai/test_openai_images.py.
ELSEWHERE = (
    "sampler=",
    "backend=http://HOST",
    "model_name=FOLDER dataset_path=train.jsonl",
    "match=letter",
    "image_sources=",
    "trackers=",  # tests/unit/run/test_trackers.py
)


@dataclass(frozen=True)
class Command:
    """One command of a page: the program, and what is typed behind it."""

    page: str
    program: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{Path(self.page).stem}: {self.program} {' '.join(self.words)}"


def pages() -> list[Path]:
    return [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]


def blocks(language: str, of: list[Path] | None = None) -> list[tuple[str, str]]:
    """``(page, text)`` of every fenced block in ``language``."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [
        (str(page.relative_to(REPO)), text)
        for page in of or pages()
        if page.name != "dev-log.md"
        for text in pattern.findall(page.read_text())
    ]


def lines_of(block: str) -> list[str]:
    """The commands of a shell block: continuation lines joined, loops run for their first value."""
    values: dict[str, str] = {}
    lines = []
    # A quoted text may go over several lines, as the JSON body of a request does.
    joined = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), block)
    for line in joined.replace("\\\n", " ").splitlines():
        if loop := re.match(r"for (\w+) in (\S+)", line):
            values[loop[1]] = loop[2]
            continue
        line = re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), line)
        line = re.sub(r"\s(>.*|&)$", "", re.sub(r"(^|\s)#.*", "", line).strip())
        lines += [part.strip() for part in line.split("&&") if part.strip()]
    return lines


def documented() -> list[Command]:
    """Every command that is to be run; an unknown one is an error.

    Of those that differ in their folder alone, the first is run.
    """
    found: dict[tuple[str, tuple[str, ...]], Command] = {}
    for page, block in blocks("bash"):
        for line in lines_of(block):
            line = re.sub(r"^(\w+=\S+ )+", "", line)
            if line.startswith(NOT_RUN) or any(f" {setting}" in line for setting in ELSEWHERE):
                continue
            words = shlex.split(line)
            if words[0] == "tinker-cookbook":
                words = ["python", "-m", module_of(words[1]), *words[2:]]
            assert words[:2] == ["python", "-m"] or words[0] in ("tinker", "curl"), (page, line)
            at = 2 if words[0] == "python" else 0
            typed = tuple(word for word in words[at + 1 :] if word != "…")
            settings = tuple(
                word for word in typed if not word.startswith(("log_path=", "log_dir="))
            )
            found.setdefault((words[at], settings), Command(page, words[at], typed))
    return list(found.values())


def of_agents() -> list[tuple[str, list[str]]]:
    """The programs and the keys that AGENTS.md and the skills type."""
    files = [REPO / "AGENTS.md", *REPO.glob("skills/*/SKILL.md")]
    lines = [line for _, block in blocks("bash", files) for line in lines_of(block)]
    typed = [shlex.split(line)[2:] for line in lines if line.startswith("python -m ")]
    return [(words[0], [word.split("=")[0] for word in words if "=" in word]) for words in typed]


COMMANDS = documented()
OF_SERVERS = [c for c in COMMANDS if c.program == "tinker_cookbook.server"]
OF_CLIENTS = [c for c in COMMANDS if c.program in ("tinker", "curl")]
PROGRAMS = [c for c in COMMANDS if c not in OF_SERVERS + OF_CLIENTS]
# Those with verifiers, LiteLLM or Ray need environments of their own:
# tests/conformance/test_verifiers.py, test_litellm.py, tests/unit/rl/test_other_processes.py.
# A store of samples trains the demo model: tests/unit/capture/test_capture_recording.py.
_ELSEWHERE = (
    "verifiers.",
    "litellm.",
    "RayExecutor",
    "capture_to_store",
    '"image_url"',
    "open_record",
)
EXAMPLES = [
    (page, text) for page, text in blocks("python") if not any(part in text for part in _ELSEWHERE)
]
