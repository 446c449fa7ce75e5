"""A folder with what the commands and Python examples of README and docs need.

Commands keep the keys that the page shows. Values that name a large model, a dataset of the Hub or
a folder of the user are replaced, and settings that make the run short are added. Python examples
keep their text, except for such values.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path

import chz
import forks
from documented_commands import COMMANDS, Command, blocks
from homes import new_home
from recipe_runs import REPO
from tiny_model import make_chat_model, make_tiny_model

from recipes.search_tool.corpus import read_corpus
from recipes.search_tool.retrieval import SearchIndex
from recipes.start import example_data
from tinker_cookbook.utils.command_line.entrypoint import config_class_of

RUN = {"device": "cpu", "dtype": "float32", "lora_rank": "4", "max_steps": "1"}
# Each program gets those that are settings of it, and `max_steps` by its own name.
SHORT = {
    **RUN, "num_steps": "1", "renderer_name": "role_colon", "batch_size": "2",
    "groups_per_batch": "2", "group_size": "2", "max_tokens": "4", "num_test": "2",
    "max_validation_questions": "2", "max_queries": "8",
    "rl_batch_size": "2", "rl_group_size": "2", "rl_max_tokens": "4",
}  # fmt: skip
# None: the program's own default.
SPECIAL: dict[str, dict[str, str | None]] = {
    "recipes.tool_use.train": {
        "renderer_name": "qwen3_instruct", "model_name": "tiny", "tiny_steps": "5",
    },
    "recipes.preference.dpo.train": {"eval_every": "0"},
    "tinker_cookbook.supervised.train": {"renderer_name": None, "max_steps": None},
    "tinker_cookbook.sweep": {
        **RUN, "renderer_name": "role_colon", "learning_rate": "1e-4,3e-4", "batch_size": "2",
        "lora_rank": "4,8", "log_dir": "sweeps/first",
    },
    "recipes.rubric.debug_env": {"device": "cpu", "max_tokens": "4", "renderer_name": "role_colon"},
    "recipes.rubric.generate_data": {"num_train": "4", "num_test": "2"},
    "recipes.search_tool.train": {"renderer_name": None},
    "recipes.search_tool.offline_eval": {"renderer_name": None, "max_turns": "2"},
    # Documents that fit into the context of the small model.
    "recipes.rl_numerics_check.train": {
        "task.num_pages_min": "1", "task.num_pages_max": "1", "task.page_chars": "40",
    },
}  # fmt: skip


def known_settings(program: str) -> Container[str]:
    """Returns the settings of a program; without a config only a model."""
    config = config_class_of(getattr(importlib.import_module(program), "main", None))
    return {"model_name"} if config is None else chz.chz_fields(config)


def short_settings(program: str, typed: Container[str] = ()) -> dict[str, str | None]:
    """Returns settings that make a run short; ``typed`` are the names on the page."""
    known = known_settings(program)
    values: dict[str, str | None] = {name: text for name, text in SHORT.items() if name in known}
    if "group_size" in known and "eval_every" in known:
        values |= {"eval_every": "0"}
    if "batch_size" in typed and "batch_size" not in known:  # its other name
        values |= {"batch_size": values.pop("groups_per_batch", None)}
    return values | SPECIAL.get(program, {})


# Text that stands before an example, where a page shows only the part that matters.
PRELUDES = {
    "docs/evaluations.md": """
from pathlib import Path

renderer = None
Path("DATA/gsm8k").mkdir(parents=True, exist_ok=True)
Path("DATA/gsm8k/train.jsonl").write_text('{"question": "1 + 1?", "answer": "It is 2.\\\\n#### 2"}')
""",
    # Examples of a page run one by one, so the second needs the tools of the first.
    "docs/tools.md": """
from pathlib import Path

from recipes.tool_use.tiny_model import make_tokenizer
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import tool

Path("tools").mkdir(exist_ok=True)
make_tokenizer(Path("tools"))
renderer = get_renderer("qwen3_instruct", get_tokenizer("tools"))


@tool
def add(a: int, b: int) -> int:
    return a + b


class Shop:
    def __init__(self, prices):
        self.prices = prices

    @tool
    def price(self, item: str) -> int:
        return self.prices[item]


""",
    "docs/renderers.md": """
messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
tokens = [40, 41, 42]
""",
}


class Reader:
    """A folder with a reader's files, and a small model in place of the large ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tiny_model(folder / "model")
        self._add_chat_template()
        rows = example_data("conversations.jsonl").read_text().splitlines()[:12]
        for name in ("my.jsonl", "my.csv"):
            (folder / name).write_text("\n".join(rows) + "\n")
        # Answers of a teacher, as recipes.prompt_distillation.create_data writes them.
        answers = [
            {
                "messages": [
                    {"role": "user", "content": f"Text {i}"},
                    {"role": "assistant", "content": "en"},
                ],
                "group": str(i),
            }
            for i in range(12)
        ]
        (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
        problems = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]
        (folder / "problems").mkdir()
        for name, part in (("train", problems[:6]), ("test", problems[6:])):
            rows_of_part = "".join(json.dumps(row) + "\n" for row in part)
            (folder / "problems" / f"{name}.jsonl").write_text(rows_of_part)
        for name in ("tasks.jsonl", "held_out.jsonl"):
            test = {"input": "1 2", "output": "3", "testtype": "stdin_stdout"}
            task = json.dumps({"problem": "Print the sum.", "tests": [test]})
            (folder / name).write_text(f"{task}\n" * 4)
        lines = [f"What is {i}?,It is {i}." for i in range(8)]
        (folder / "questions.csv").write_text("\n".join(["question,answer", *lines]))
        capitals = [f"Land {i},City {i}" for i in range(48)]
        (folder / "capitals.csv").write_text("\n".join(["country,capital", *capitals]))
        # Modules that a page shows, and that its commands use.
        for module, name in (("my_data", "class Capitals(Chat"), ("my_shop", "class MyShop(")):
            (text,) = [text for _, text in blocks("python") if name in text]
            (folder / f"{module}.py").write_text(text)
        self.runs = 0

    def _add_chat_template(self) -> None:
        path = Path(self.model) / "tokenizer_config.json"
        template = (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
        config = {**json.loads(path.read_text()), "chat_template": template}
        path.write_text(json.dumps(config))

    def example(self, page: str, text: str) -> str:
        """Returns a Python example with values that exist here."""
        text = PRELUDES.get(page, "") + text
        text = re.sub(r'"(HuggingFaceTB|Qwen)/[^"]+"', repr(self.model), text)
        text = re.sub(r'"(smollm2|qwen3)"', '"role_colon"', text)
        if "tinker://RUN" in text:
            text = re.sub(r"tinker://RUN/sampler_weights/\w+", self.checkpoint(), text)
        if "/tmp/tinker-examples/sl_basic" in text:
            rows = [{"step": 0, "test/nll": 2.0}, {"step": 1, "train_mean_nll": 1.5}]
            path = self.folder / "metrics.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            text = text.replace("/tmp/tinker-examples/sl_basic/metrics.jsonl", str(path))
        text = text.replace("/tmp/tinker-examples", f"{self.folder}/runs")
        if "sweeps/first" in text:
            self.sweep()
        # Needs an account on the Hub; a call of dict takes any keywords.
        text = text.replace("weights.publish_to_hf_hub(", "dict(")
        if "rl.run(" in text:
            run = "max_steps=1, behavior_if_log_dir_exists='delete'"
            text, count = re.subn(r"max_steps=\d+", run, text)
            assert count == 1, text
        return text

    def sweep(self) -> None:
        """Runs the sweep whose results an example of the sweeps page reads, if it has not run."""
        if not (self.folder / "sweeps").exists():
            page = next(c for c in COMMANDS if c.program == "tinker_cookbook.sweep")
            self.run([sys.executable, "-m", page.program, *self.words(page)])

    def words(self, command: Command) -> list[str]:
        """The words of a command, with values that this machine has."""
        words = [word for word in command.words if "=" not in word or word.startswith("-")]
        typed = dict(word.split("=", 1) for word in command.words if word not in words)
        if "--help" in words:
            return list(command.words)
        programs = ("tinker_cookbook.sandbox", "tinker_cookbook.doctor", "tinker_cookbook.runs")
        if command.program in programs:
            return list(command.words)
        if command.program == "tinker_cookbook.weights":
            return self.weights_words(command)
        return words + [f"{k}={v}" for k, v in {**typed, **self.values(command, typed)}.items()]

    def weights_words(self, command: Command) -> list[str]:
        """The words of an export, or of the card of one that a command of the page has made."""
        self.runs += 1
        if command.words[0] == "card":
            results = self.folder / "results" / "gsm8k"
            results.mkdir(parents=True, exist_ok=True)
            counts = {"num_examples": 4, "num_correct": 2, "num_errors": 0}
            result = {"name": "gsm8k", "score": 0.5, **counts}
            (results / "result.json").write_text(json.dumps(result))
            return list(command.words)
        path = ("PATH", "tinker://RUN/sampler_weights/final")
        words = [self.checkpoint() if word in path else word for word in command.words]
        words = [self.log_folder() if word == "LOG_PATH" else word for word in words]
        words = [word for word in words if not word.startswith("vllm_python=")]
        return [*words, "overwrite=True", "device=cpu"]

    def values(self, command: Command, typed: dict[str, str]) -> dict[str, str]:
        self.runs += 1
        if command.program == "tinker_cookbook.chat":  # its input is empty, so it only opens models
            paths = typed["model_path"].replace("tinker://RUN/sampler_weights/final", "{}")
            paths = paths.replace("LOG_PATH", self.log_folder()).format(self.checkpoint())
            return {"model_path": paths, "device": "cpu"}
        if command.program == "tinker_cookbook.eval":
            short = {"tasks": "gsm8k", "limit": "2", "max_tokens": "4", "device": "cpu"}
            data = {"data_path": str(self.folder / "problems"), "out": str(self.folder / "eval")}
            return {**short, **data, "model_path": self.checkpoint()}
        if command.program.startswith("recipes.search_tool."):
            return self.search_values(command, typed)
        if command.program == "tinker_cookbook.rl.train":
            return self.tool_values()
        values = short_settings(command.program, typed)
        for key in typed:
            if key.endswith(("model_name", "model_name_for_tokenizer", "teacher_model")):
                values[key] = self.model
            elif key in ("teacher_checkpoint", "grader_model_path"):
                values[key] = self.checkpoint()
            elif key == "file_path":
                values[key] = str(self.folder / "answers.jsonl")
            elif typed[key] == "FOLDER":
                values[key] = str(self.folder / "problems")
            elif typed[key] == "…" and key == "dataset":
                values[key] = "sums"
            elif typed[key] == "…":
                values.setdefault(key, "0.001")
        known = known_settings(command.program)
        if "model_name" in known:
            values.setdefault("model_name", self.model)
        if typed.get("test_size"):
            values["test_size"] = "2"
        if "log_path" in known:
            values["log_path"] = str(self.folder / f"run-{self.runs}")
        return {name: text for name, text in values.items() if text is not None}

    def tool_values(self) -> dict[str, str]:
        """Settings of a program that calls tools, with a model whose chat format has them."""
        model = str(self.folder / "tool-model")
        if not Path(model).exists():
            program = [sys.executable, "-m", "recipes.tool_use.tiny_model"]
            self.run([*program, f"output={model}", "steps=1"])
        names = {"model_name": model, "dataset_builder.model_name": model}
        place = {"log_path": str(self.folder / f"run-{self.runs}")}
        return {**RUN, **names, **place, "max_tokens": "4"}

    def search_values(self, command: Command, typed: dict[str, str]) -> dict[str, str]:
        """Settings of a program that searches; makes a model and documents the first time."""
        documents = self.folder / "MY_DOCUMENTS"
        model = str(self.folder / "qwen3-search-instruct")
        if not documents.exists():
            documents.mkdir()
            (documents / "lamp.txt").write_text("Ada built the lamp.")
            answers = [{"text": "Ada"}]
            asked = [{"question": f"Who {i}?", "answers": answers} for i in range(4)]
            paragraph = {"context": "Ada built the lamp.", "qas": asked}
            squad = {"data": [{"paragraphs": [paragraph]}]}
            (self.folder / "xquad.en.json").write_text(json.dumps(squad))
            rows = [{"question": f"Who {i}?", "answer": "Ada"} for i in range(4)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (self.folder / "my_questions.jsonl").write_text(text)
            (self.folder / "wiki_index").mkdir()
            SearchIndex.build(read_corpus(str(documents))).save(self.folder / "wiki_index")
            make_chat_model(Path(model))
        values = {}
        if not command.program.endswith(".index"):
            values = short_settings(command.program, typed)
        if command.program.endswith(".train"):
            values |= {"model_name": model, "log_path": str(self.folder / f"run-{self.runs}")}
        if command.program.endswith(".offline_eval"):
            log_path = self.folder / "search"
            run = Command(command.page, "recipes.search_tool.train", ())
            settings = {**self.search_values(run, {}), "log_path": str(log_path)}
            words = [f"{key}={value}" for key, value in settings.items()]
            self.run([sys.executable, "-m", run.program, *words])
            last = json.loads((log_path / "checkpoints.jsonl").read_text().splitlines()[-1])
            values["model_path"] = last["sampler_path"]
        if typed.get("dataset") == "search_r1":  # from the Hub
            values["dataset"] = "my_questions.jsonl"
        return {name: text for name, text in values.items() if text is not None}

    def log_folder(self) -> str:
        """Returns the log folder of a short run."""
        self.checkpoint()
        return str(self.folder / "teacher")

    def checkpoint(self) -> str:
        """Returns the ``tinker://`` path of a short run's sampler weights."""
        log_path = self.folder / "teacher"
        if not log_path.exists():
            settings = {**short_settings("recipes.sl_loop"), "model_name": self.model}
            words = [f"{k}={v}" for k, v in {**settings, "log_path": log_path}.items()]
            self.run([sys.executable, "-m", "recipes.sl_loop", *words])
        lines = (log_path / "checkpoints.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["sampler_path"]

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "TINKER_COOKBOOK_HOME": new_home(self.folder / "home"),
            "TINKER_COOKBOOK_RUNS_DIR": str(self.folder / "runs"),
            "PYTHONPATH": f"{REPO}:{self.folder}",
            **more,
        }

    def server_words(self, command: Command) -> list[str]:
        words = [word for word in command.words if not word.startswith("model_name=")]
        return [*words, f"model_name={self.model}", "device=cpu", "dtype=float32"]

    def start_server(self, words: list[str], port: int) -> subprocess.Popen[str]:
        """Starts a server and returns when it accepts connections."""
        log = self.folder / "server.log"
        with log.open("w") as output:
            process = forks.Popen(
                [sys.executable, "-m", "tinker_cookbook.server", *words, f"port={port}"],
                cwd=self.folder,
                env=self.environment(PYTHONUNBUFFERED="1"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return process
            time.sleep(0.1)

    def run(self, words: list[str], **environment: str) -> str:
        settings = {"cwd": self.folder, "env": self.environment(**environment)}
        if official := Path(words[0]).name == "tinker":
            words = [sys.executable, "-m", "tinker.cli", *words[1:]]
        if words[0] == sys.executable:
            done = forks.run(words, timeout=240, **settings)
        else:
            done = subprocess.run(words, capture_output=True, text=True, timeout=240, **settings)
        # Threads of the SDK sometimes abort its command at exit, after the work is done.
        expected = (0, -signal.SIGABRT) if official else (0,)
        assert done.returncode in expected, (
            f"{shlex.join(words)} ended with {done.returncode}\n"
            f"{done.stdout[-1500:]}{done.stderr[-3000:]}"
        )
        return done.stdout
