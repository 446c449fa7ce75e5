"""The programs of the official cookbook's recipes, and the settings that make two steps small.

``{model}`` is a small Llama, ``{qwen}`` a tiny Qwen3 and ``{vision}`` a tiny Qwen3.5 that sees
images, both under names of hosted models; ``{data}`` is the folder with the files of
``write_data``. ``CANNOT`` gives the programs that are not run, with the reason.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import shutil
import wave
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets

PACKAGE = "official_recipes"
CHECKOUT = "checkout"  # programs read example data relative to the folder that they start in
QWEN = "Qwen/Qwen3.5-9B"
VISION = "Qwen/Qwen3.6-35B-A3B"
# Models that programs and tutorials name themselves.
SERVED = (QWEN, "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base", VISION)


@dataclass(frozen=True)
class Recipe:
    """A program of the original's recipes; ``rows`` of metrics are what it must write."""

    name: str
    settings: str = ""
    over_server: bool = False
    rows: int = 2
    own_words: bool = False
    """Whether it takes no ``model_name``, ``log_path`` and ``max_steps``."""


_RL = "group_size=2 max_tokens=8 eval_every=0"
_QWEN = "model_name={qwen} renderer_name=qwen3_5_disable_thinking"
_TERMINAL = "terminal-bench-2.0/terminal-bench"
_HARBOR = f"{_QWEN} groups_per_batch=1 {_RL} max_turns=2"
_JSONL = "train_jsonl_path={data}/rubric.jsonl test_jsonl_path={data}/rubric.jsonl"
_GRADER = "grader_llm_name={qwen} grader_renderer_name=qwen3_5_disable_thinking"
_FORECASTS = "data_path={data}/forecasts.csv max_train_questions=8 max_validation_questions=2"
_PICTURES = "model_name={vision} dataset=caltech101"
RECIPES = (
    Recipe("audio.emotion.prepare_data", "data_path={data}/sound", rows=0, own_words=True),
    Recipe("chat_sl.train", "model_name={qwen} batch_size=4 eval_every=0"),
    Recipe(
        "chat_sl.sweep.analyze", "--local-dir {data} --no-plots --output-dir {log}",
        rows=0, own_words=True,
    ),
    Recipe(
        "chat_sl.sweep.cli",
        "recipe=official_recipes.chat_sl.train base.model_name={qwen} base.batch_size=4 "
        "base.log_path={log} learning_rates=[1e-4] lora_ranks=[8] training_budget_examples=8 "
        "base.eval_every=0 sweep_dir={log}",
        own_words=True,
    ),
    Recipe("chat_sl.sweep.launch_all", "--dry-run", rows=0, own_words=True),
    Recipe("code_rl.train", f"{_QWEN} groups_per_batch=2 {_RL} sandbox_backend=local"),
    Recipe("decisions.demo", "model_name={qwen}", over_server=True, rows=0, own_words=True),
    Recipe(
        "decisions.forecasting",
        f"model_name={{qwen}} {_FORECASTS} batch_size=2 epochs=1 eval_every=1",
        over_server=True,
    ),
    Recipe(
        "distillation.off_policy_reasoning",
        "model_name={qwen} batch_size=4 max_prompts=16 buffer_size=16",
    ),
    Recipe(
        "distillation.on_policy_distillation",
        "teacher_model={model} dataset=deepmath groups_per_batch=2 group_size=2 max_tokens=8",
    ),
    Recipe(
        "distillation.on_policy_distillation_harbor_multi_turn",
        f"{_HARBOR} teacher_model={{qwen}} task_name={_TERMINAL}",
    ),
    Recipe(
        "distillation.on_policy_multi_teacher",
        "deepmath_teacher_model={model} tulu3_teacher_model={model} deepmath_groups_per_batch=1 "
        "tulu3_groups_per_batch=1 group_size=2 max_tokens=8 renderer_name=role_colon",
    ),
    Recipe("forecasting.data", "--data-path {data}/forecasts.csv", rows=0, own_words=True),
    Recipe(
        "forecasting.train",
        f"{_QWEN} {_FORECASTS} groups_per_batch=2 {_RL} validation_group_size=1 train_epochs=1",
    ),
    Recipe(
        "harbor_rl.scripts.eval_harbor_rl",
        "model_name={qwen} output_path={log} max_turns=1 max_tokens=8 max_tasks=1 ",
        rows=0, own_words=True, over_server=True,
    ),
    Recipe("harbor_rl.scripts.train_terminal_bench", _HARBOR),
    Recipe("math_rl.train", "env=arithmetic groups_per_batch=2 group_size=2 max_tokens=8"),
    Recipe("multiplayer_rl.guess_number.train", f"batch_size=2 {_RL} renderer_name=role_colon"),
    Recipe(
        "multiplayer_rl.text_arena.train",
        f"{_QWEN} batch_size=2 num_train_datapoints=4 num_test_datapoints=2 max_tokens=8 "
        "eval_every=0",
        over_server=True,
    ),
    Recipe(
        "multiplayer_rl.text_arena.play",
        f"{_QWEN} checkpoint_path={{checkpoint}} mode=eval opponent=random num_games=1",
        over_server=True, rows=0, own_words=True,
    ),
    Recipe("multiplayer_rl.twenty_questions.train", f"batch_size=2 {_RL}", over_server=True),
    Recipe("preference.dpo.train", "dataset=hhh batch_size=4"),
    Recipe(
        "preference.rlhf.rlhf_pipeline",
        "base_model={qwen} short_name=tiny batch_size=4 rl_group_size=2 rl_max_tokens=8 "
        "max_steps=2 eval_every=0",
        own_words=True, over_server=True,
    ),
    Recipe("preference.shorter.train", f"batch_size=2 {_RL} renderer_name=role_colon"),
    Recipe(
        "prompt_distillation.create_data", "output_file={log}/made.jsonl",
        over_server=True, rows=0, own_words=True,
    ),
    Recipe("prompt_distillation.train", "file_path={data}/chats.jsonl batch_size=4"),
    Recipe("rl_basic", "max_tokens=4"),
    Recipe("rl_loop", "batch_size=2 group_size=2 max_tokens=8", over_server=True),
    Recipe(
        "rl_numerics_check.train",
        f"{_QWEN} groups_per_batch=2 {_RL} task.num_pages_min=2 task.num_pages_max=2 "
        "task.page_chars=200 task.num_pages_hint=exact",
    ),
    Recipe("rubric.debug_env", over_server=True, rows=0, own_words=True),
    Recipe("rubric.generate_data", rows=0, own_words=True),
    Recipe(
        "rubric.prometheus_experimental",
        f"{_QWEN} {_GRADER} groups_per_batch=2 train_group_size=2 max_tokens=8 eval_every=0",
        over_server=True,
    ),
    Recipe(
        "rubric.train",
        f"{_QWEN} {_GRADER} {_JSONL} groups_per_batch=2 train_group_size=2 max_tokens=8 "
        "eval_every=0",
        over_server=True,
    ),
    Recipe("sdft.train", "groups_per_batch=2 max_tokens=8"),
    Recipe(
        "sdft.benchmark",
        "model_name={qwen} data_dir={data}/sdft phase=sdft groups_per_batch=2 max_tokens=8 "
        "max_steps=2 log_root={log}",
        own_words=True, over_server=True,
    ),
    Recipe(
        "sdft.run_continual_learning", "dry_run=true data_dir={data}/sdft log_root={log}",
        rows=0, own_words=True,
    ),
    Recipe("search_tool.train", f"{_QWEN} batch_size=2 {_RL}"),
    Recipe(
        "search_tool.offline_eval",
        "base_model={qwen} tinker_checkpoint_url={checkpoint} max_eval_samples=1 max_tokens=8",
        over_server=True, rows=0, own_words=True,
    ),
    Recipe("sl_basic", "eval_every=0"),
    Recipe("sl_loop", "batch_size=4", over_server=True),
    Recipe(
        "true_thinking_score.analyze",
        "model_name={qwen} dataset=gsm8k n_problems=1 max_tokens=32 log_path={log}",
        over_server=True, rows=0, own_words=True,
    ),
    Recipe("true_thinking_score.run_small_experiment", over_server=True, rows=0, own_words=True),
    Recipe(
        "verifiers_rl.train",
        f"{_QWEN} vf_env_id=old_letters groups_per_batch=2 group_size=2 max_tokens=8 dataset_n=8",
    ),
    Recipe(
        "vlm_classifier.eval", f"{_PICTURES} model_path={{vision_checkpoint}} max_tokens=8",
        over_server=True, rows=0, own_words=True,
    ),
    Recipe(
        "vlm_classifier.eval_sweep",
        "model_name={vision} experiment_dir={data}/experiments output_file={log}/results.json "
        "max_tokens=8",
        over_server=True, rows=0, own_words=True,
    ),
    Recipe(
        "vlm_classifier.sweep",
        "model_name={vision} experiment_dir={log} examples_per_class=[1] num_repeats=0.125 "
        "batch_size=2 num_parallel=1",
        own_words=True,
    ),
    Recipe(
        "vlm_classifier.train",
        f"{_PICTURES} experiment_dir={{log}} max_steps=2 batch_size=2 max_tokens=8",
        own_words=True,
    ),
)  # fmt: skip
CANNOT = {
    "verifiers_rl.evaluate": "prints its result with errors=[]; verifiers 0.1.9, the only version "
    "that the original allows, then raises IndexError",
}
if find_spec("verifiers") is None:
    CANNOT["verifiers_rl.train"] = "needs verifiers 0.1.9"
if shutil.which("ffmpeg") is None:
    CANNOT["audio.emotion.prepare_data"] = "needs ffmpeg"


def programs_of(source: Path) -> list[str]:
    """Names of the modules of the original's recipes that are programs."""
    folder = source / "tinker_cookbook" / "recipes"
    return [
        ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in sorted(folder.rglob("*.py"))
        if any(
            isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            for node in ast.parse(file.read_text("utf-8")).body
        )
    ]


def copy_recipes(source: Path, scratch: Path) -> None:
    """Copies the recipes as the package of a user; only the name of their package changes."""
    target = scratch / PACKAGE
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / "tinker_cookbook" / "recipes", target)
    for file in target.rglob("*.py"):
        text = file.read_text("utf-8")
        file.write_text(re.sub(r"\btinker_cookbook\.recipes\b", PACKAGE, text), "utf-8")
    examples = Path("tinker_cookbook", "example_data")
    shutil.copytree(source / examples, scratch / CHECKOUT / examples, dirs_exist_ok=True)
    for folder in [target, *[path for path in target.rglob("*") if path.is_dir()]]:
        (folder / "__init__.py").touch()


_TASK = """
version = "1.0"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 60.0
"""


def write_data(scratch: Path, home: Path) -> Path:
    """Writes the files that programs read, and Harbor's tasks into the home folder."""
    data = scratch / "data"
    (data / "texts").mkdir(parents=True, exist_ok=True)
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "en"}]}
    (data / "chats.jsonl").write_text((json.dumps(row) + "\n") * 16, "utf-8")
    rubric = {
        "rubric_str": "Is it 2?", "extraction_regex": "<score>(.*?)</score>",
        "grader_output_format_instruction": "Write <score>0</score> or <score>1</score>.",
    }  # fmt: skip
    row = {"convo": [{"role": "user", "content": "What is 1 + 1?"}], "rubric_items": [rubric]}
    (data / "rubric.jsonl").write_text((json.dumps(row) + "\n") * 16, "utf-8")
    _write_forecasts(data / "forecasts.csv")
    _write_pictures(scratch / CHECKOUT / "dpdl-benchmark" / "caltech101")
    _write_sound(data / "sound")
    asked = {"role": "user", "content": "Which one? A: this, B: that"}
    turns = [{"role": "system", "content": "Answer."}, asked]
    answer = "<reasoning>It is.</reasoning>\n<answer>A</answer>"
    for split, row in (
        ("train_data", {"messages": turns, "output_text": answer}),
        ("eval_data", {"prompt": turns, "answer": "A"}),
    ):
        target = data / "sdft" / "science_data" / split
        datasets.Dataset.from_list([row] * 4).save_to_disk(target)
    for name in ("one", "two"):
        task = home / ".cache" / "harbor" / "tasks" / _TERMINAL / name
        (task / "environment").mkdir(parents=True, exist_ok=True)
        (task / "tests").mkdir(exist_ok=True)
        (task / "instruction.md").write_text("Print 1.", "utf-8")
        (task / "task.toml").write_text(_TASK, "utf-8")
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n", "utf-8")
        (task / "tests" / "test.sh").write_text("exit 1\n", "utf-8")
    return data


def _write_forecasts(file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer: csv.DictWriter[str] | None = None
        for i in range(24):
            month = 8 + i % 2 * 3  # half of the questions before the split, half after it
            row = {
                "submission_id": f"s{i}", "event_ticker": f"E{i}", "title": f"Event {i}",
                "snapshot_time": f"2025-{month:02}-10T00:00:00Z",
                "close_time": f"2025-{month:02}-20T00:00:00Z",
                "market_outcome": json.dumps({"Yes wins": i % 3 % 2}), "category": "Sports",
                "markets": json.dumps(["Yes wins"]),
                "sources": json.dumps([{"title": "A", "summary": "It may happen."}]),
            }  # fmt: skip
            if writer is None:
                writer = csv.DictWriter(out, fieldnames=list(row))
                writer.writeheader()
            writer.writerow(row)


def _write_pictures(folder: Path) -> None:
    """Pictures in a folder that ``load_dataset`` finds by the name of the Hub's data set."""
    from PIL import Image

    for split in ("train", "test"):
        for name in ("red", "blue"):
            target = folder / split / name
            target.mkdir(parents=True, exist_ok=True)
            for i in range(4):
                Image.new("RGB", (64, 64 + 16 * i), name).save(target / f"{i}.png")


def _write_sound(folder: Path) -> None:
    """Silence in the files of the Expresso release: two sentences in two styles."""
    shutil.rmtree(folder, ignore_errors=True)
    names = [f"ex01_{style}_0000{i}" for style in ("happy", "sad") for i in (1, 2)]
    (folder / "expresso" / "splits").mkdir(parents=True)
    texts = "".join(f"{name}\tSentence {name[-1]}.\n" for name in names)
    (folder / "expresso" / "read_transcriptions.txt").write_text(texts, "utf-8")
    for split in ("train", "dev", "test"):
        listed = "".join(f"{name}\n" for name in names)
        (folder / "expresso" / "splits" / f"{split}.txt").write_text(listed, "utf-8")
    for name in names:
        speaker, style, _ = name.split("_")
        target = folder / "expresso" / "audio_48khz" / "read" / speaker / style / "base"
        target.mkdir(parents=True, exist_ok=True)
        with wave.open(str(target / f"{name}.wav"), "wb") as file:
            file.setparams((1, 3, 48_000, 0, "NONE", ""))  # one channel, 24 bits
            file.writeframes(bytes(3 * 4_800))


def write_experiment(data: Path, checkpoint: str) -> None:
    """The folder that a sweep of ``vlm_classifier`` leaves, with sampler weights of the server."""
    folder = data / "experiments" / "caltech101-tiny-8rank-0.0001lr-2batch-1shot-seed0-2026-01-01"
    folder.mkdir(parents=True, exist_ok=True)
    row = {"name": "final", "batch": 2, "sampler_path": checkpoint}
    (folder / "checkpoints.jsonl").write_text(json.dumps(row) + "\n", "utf-8")


def copy_model(model: Path, scratch: Path) -> Path:
    """A copy of a small model whose context is long enough for the recipes' prompts."""
    target = scratch / "model"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = 8192
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    return target


def make_served_models(hub_cache: Path) -> list[str]:
    """Tiny Qwen models with random weights in the Hub cache, under names of hosted models."""
    import torch
    from transformers import AutoTokenizer

    for name in SERVED:
        folder = hub_cache / "hub" / f"models--{name.replace('/', '--')}" / "snapshots"
        snapshot = next(folder.iterdir())
        if (snapshot / "model.safetensors").is_file():
            continue
        tokenizer = AutoTokenizer.from_pretrained(snapshot)
        network = _seeing_network(tokenizer) if name == VISION else _network(tokenizer)
        with torch.no_grad():  # one token in about 17 ends the answer, as far as training lets it
            embeddings = network.get_input_embeddings().weight
            embeddings[:, 0] = 1.0
            embeddings[tokenizer.eos_token_id, 0] = 3.3
        network.save_pretrained(snapshot)
    return list(SERVED)


def _text_settings(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip


def _network(tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_text_settings(tokenizer)))


def _seeing_network(tokenizer: Any) -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    text = {
        **_text_settings(tokenizer), "layer_types": ["full_attention"], "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1,
        "out_hidden_size": 16, "num_position_embeddings": 256,
    }  # fmt: skip
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"),
            ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"),
        )
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    return Qwen3_5ForConditionalGeneration(config)
