"""Runs recipes of the official tinker-cookbook, unchanged, on the bundled engine.

The recipes are copied into a package of their own, as a user keeps them who copied them from the
official repository, and run for two steps with a small model. Datasets of the Hub are replaced by
a few generated rows of the same columns. Recipes that create ``tinker.ServiceClient`` themselves
talk to this project's server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "official_recipes"
SERVED = "Qwen/Qwen3.5-9B"
_LIMIT_SECONDS = 600

# Run in each recipe's process: what it loads from the Hub comes from here.
_LAUNCHER = """
import runpy
import sys

import datasets


def sums(count):
    return [
        {"question": f"What is {i} + {i}?", "answer": f"Add them.\\n#### {2 * i}",
         "final_answer": str(2 * i), "r1_solution_1": f"{2 * i}"}
        for i in range(count)
    ]


def chats(count):
    return [
        {"prompt": f"Hello {i}", "messages": [
            {"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}."}]}
        for i in range(count)
    ]


def choices(count):
    return [
        {"question": f"What is {i} + {i}?", "answerKey": "B", "answer": "B", "type": "mcq",
         "choices": {"text": ["0", str(2 * i), "7", "9"], "label": ["A", "B", "C", "D"]},
         "domain": "Chemistry", "details": {"level": "L3"}}
        for i in range(count)
    ]


def pairs(count):
    start = "\\n\\nHuman: Name a colour, {i}.\\n\\nAssistant: "
    return [
        {"chosen": start.format(i=i) + "Red.", "rejected": start.format(i=i) + "No."}
        for i in range(count)
    ]


ROWS = {"gsm8k": sums, "DeepMath": sums, "no_robots": chats, "tulu": chats, "hh-rlhf": pairs,
        "SciKnowEval": choices}
load_from_hub = datasets.load_dataset


def load_dataset(path, name=None, *args, split=None, **kwargs):
    rows = next((rows for part, rows in ROWS.items() if part in path), None)
    if rows is None:
        return load_from_hub(path, name, *args, split=split, **kwargs)
    both = {"train": rows(512), "test": rows(160)}
    found = datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in both.items()})
    return found[split] if split else found


datasets.load_dataset = load_dataset
module = sys.argv[1]
sys.argv = [module, *sys.argv[2:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Recipe:
    """A recipe of the original and the settings that make its two steps small."""

    name: str
    settings: str
    over_server: bool = False


_RL = "batch_size=2 group_size=2 max_tokens=8 renderer_name=role_colon"
RECIPES = (
    Recipe("sl_basic", "eval_every=0"),
    Recipe("sl_loop", "batch_size=4", over_server=True),
    Recipe("rl_basic", "max_tokens=4"),
    Recipe("rl_loop", "batch_size=2 group_size=2 max_tokens=8", over_server=True),
    Recipe("math_rl.train", "env=arithmetic groups_per_batch=2 group_size=2 max_tokens=8"),
    Recipe("multiplayer_rl.guess_number.train", f"{_RL} eval_every=0"),
    Recipe(
        "multiplayer_rl.twenty_questions.train",
        "batch_size=2 group_size=2 max_tokens=8 eval_every=0",
        over_server=True,
    ),
    Recipe("preference.dpo.train", "dataset=hhh batch_size=4"),
    Recipe("preference.shorter.train", _RL),
    Recipe("prompt_distillation.train", "file_path={chats} batch_size=4"),
    Recipe(
        "distillation.on_policy_distillation",
        "teacher_model={model} dataset=deepmath groups_per_batch=2 group_size=2 max_tokens=8",
    ),
    Recipe("sdft.train", "groups_per_batch=2 max_tokens=8"),
)


def copy_recipes(source: Path, scratch: Path) -> None:
    """Copies the recipes as the package of a user; only the name of their package changes."""
    target = scratch / PACKAGE
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / "tinker_cookbook" / "recipes", target)
    for file in target.rglob("*.py"):
        text = file.read_text("utf-8")
        file.write_text(re.sub(r"\btinker_cookbook\.recipes\b", PACKAGE, text), "utf-8")
    for folder in [target, *[path for path in target.rglob("*") if path.is_dir()]]:
        (folder / "__init__.py").touch()
    (scratch / "run_official.py").write_text(_LAUNCHER, "utf-8")


def copy_model(model: Path, scratch: Path) -> Path:
    """A copy of a small model whose context is long enough for the recipes' prompts."""
    target = scratch / "model"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = 8192
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    return target


def make_served_model(hub_cache: Path) -> str:
    """A tiny Qwen3 with random weights in the Hub cache, under the name of a hosted model.

    The answerer of twenty_questions is that hosted model, whatever model is trained.
    """
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = hub_cache / "hub" / f"models--{SERVED.replace('/', '--')}" / "snapshots"
    snapshot = next(folder.iterdir())
    tokenizer = AutoTokenizer.from_pretrained(snapshot)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=16, max_position_embeddings=8192,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(snapshot)
    return SERVED


def _write_data(scratch: Path) -> dict[str, str]:
    chats = scratch / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "en"}]}
    chats.write_text("".join(json.dumps(row) + "\n" for _ in range(16)), "utf-8")
    return {"chats": str(chats)}


def run_recipe(
    recipe: Recipe, scratch: Path, implementation: Path, model: str, environment: dict[str, str]
) -> str:
    """Runs two steps of a recipe; ``ok (N rows)`` or the last line of its error."""
    folder = scratch / "runs" / recipe.name
    shutil.rmtree(folder, ignore_errors=True)
    settings = recipe.settings.format(model=model, **_write_data(scratch)).split()
    command = [sys.executable, str(scratch / "run_official.py"), f"{PACKAGE}.{recipe.name}"]
    command += [f"model_name={model}", f"log_path={folder}", "max_steps=2", *settings]
    path = os.pathsep.join([str(implementation), str(scratch)])
    env = {**os.environ, **environment, "PYTHONPATH": path}
    log = scratch / f"{recipe.name}.log"
    with open(log, "w", encoding="utf-8") as out:
        try:
            status = subprocess.run(
                command, env=env, cwd=scratch, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, timeout=_LIMIT_SECONDS,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end after {_LIMIT_SECONDS} s; see {log}"
    metrics = next(folder.rglob("metrics.jsonl"), None)
    rows = len(metrics.read_text("utf-8").splitlines()) if metrics is not None else 0
    if status == 0 and rows >= 2:
        return f"ok ({rows} rows of metrics)"
    last = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return f"status {status}, {rows} rows: {last[-1][:300] if last else 'no output'}"
