"""Evaluation harnesses against the server's OpenAI API, with their defaults.

Each has an environment of its own, which the first run makes: Inspect AI 180 MB, lm-eval 380 MB,
about a minute each. ``test_openai_clients.py`` has Inspect with tools.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from environments import python_with, run_in

pytestmark = [pytest.mark.slow, pytest.mark.shared]

TASKS = Path(__file__).resolve().parent / "harness_tasks.py"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

LM_EVAL_TASKS = {
    "generate_until": """
        doc_to_text: "Once {{name}} went to the park."
        doc_to_target: "{{name}}"
        generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24}
        metric_list: [{metric: exact_match}]
    """,
    "multiple_choice": """
        doc_to_text: "{{name}} was a little"
        doc_to_choice: [" girl", " engine of a car", " boy"]
        doc_to_target: 0
        metric_list: [{metric: acc}]
    """,
    "loglikelihood_rolling": """
        doc_to_text: ""
        doc_to_target: "Once upon a time, there was a little girl named {{name}}."
        metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
    """,
}


def test_a_task_of_inspect_gives_what_the_model_gives(serving, stories_model, tmp_path):
    """Half a minute, by /chat/completions; ``test_openai_clients.py`` has /responses."""
    python = python_with("inspect")
    url, key = f"{serving.url}/oai/api/v1", serving.key()
    run_in(
        python, "-m", "inspect_ai", "eval", str(TASKS.relative_to(TASKS.parents[2])),
        "--model", f"openai-api/local/{stories_model}", "--log-format", "json",
        "--log-dir", str(tmp_path), "--temperature", "0", "--max-tokens", "16",
        "--display", "plain",
        LOCAL_API_KEY=key, LOCAL_BASE_URL=url,
    )  # fmt: skip
    log = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert log["status"] == "success"
    served = {sample["id"]: sample["output"] for sample in log["samples"]}
    assert len(served) == 4
    for number, output in served.items():
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {number} + 2?"},
        ]
        num_prompt, text = _greedy(stories_model, messages)
        usage = output["usage"]
        assert output["choices"][0]["stop_reason"] == "max_tokens"
        assert usage["input_tokens"] + (usage["input_tokens_cache_read"] or 0) == num_prompt
        assert usage["output_tokens"] == 16
        assert output["completion"] == text


def _greedy(model: str, messages: list[dict[str, Any]]) -> tuple[int, str]:
    """Tokens of the prompt, and the most probable answer of 16 tokens, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    renderer = get_renderer("role_colon", get_tokenizer(model))
    prompt = torch.tensor([renderer.build_generation_prompt(messages).to_ints()])
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = network.generate(prompt, max_new_tokens=16, do_sample=False)
    message, _ = renderer.parse_response(out[0, prompt.shape[1] :].tolist())
    return prompt.shape[1], str(message["content"])


# One process for all runs: its imports take longer than a run.
_COMMANDS = """
import json, sys
from lm_eval.__main__ import cli_evaluate
for sys.argv[1:] in json.loads(sys.argv[1]):
    cli_evaluate()
"""


@pytest.fixture(scope="module")
def lm_eval(serving, stories_model, tmp_path_factory) -> Path:
    """A folder with the results of three commands: of the server, by its completions (``served``)
    and by chat (``chat``), and of the harness's own backend for transformers (``own``)."""
    folder = tmp_path_factory.mktemp("lm-eval")
    _write_tasks(folder)
    url = f"{serving.url}/oai/api/v1"
    every = ",".join(f"local_{kind}" for kind in LM_EVAL_TASKS)
    commands = [
        ["served", every, "local-completions", f"model={stories_model},base_url={url}/completions"],
        ["own", every, "hf", f"pretrained={stories_model},dtype=float32"],
        ["chat", "local_generate_until", "local-chat-completions",
         f"model={stories_model},base_url={url}/chat/completions", "--apply_chat_template"],
    ]  # fmt: skip
    words = [
        ["--include_path", str(folder), "--tasks", tasks, "--output_path", str(folder / name),
         "--log_samples", "--model", model, "--model_args", settings, *more]
        for name, tasks, model, settings, *more in commands
    ]  # fmt: skip
    run_in(
        python_with("lm-eval"), "-c", _COMMANDS, json.dumps(words),
        OPENAI_API_KEY=serving.key(), **OFFLINE,
    )  # fmt: skip
    return folder


def _results(folder: Path) -> dict[str, Any]:
    """The metrics by task."""
    return json.loads(next(folder.rglob("results_*.json")).read_text())["results"]


def test_lm_eval_gives_the_scores_of_its_own_transformers_backend(lm_eval):
    """A minute, with the next one."""
    served, own = _results(lm_eval / "served"), _results(lm_eval / "own")
    assert set(served) == {f"local_{kind}" for kind in LM_EVAL_TASKS}
    for task, metrics in own.items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers
        for name, value in numbers.items():
            assert served[task][name] == pytest.approx(value, abs=2e-3), (task, name)
    for task in served:
        assert _answers(lm_eval / "served", task) == _answers(lm_eval / "own", task)


def test_lm_eval_generates_by_chat(lm_eval):
    assert _results(lm_eval / "chat")["local_generate_until"]["exact_match,none"] == 0.0
    assert len(_answers(lm_eval / "chat", "local_generate_until")) == 4


def _write_tasks(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"name": n}) + "\n" for n in ("Lily", "Tom", "Ann", "Max")))
    for kind, text in LM_EVAL_TASKS.items():
        lines = [line.strip() for line in text.strip().splitlines()]
        data = f"{{data_files: {{test: {rows}}}}}"
        head = [f"task: local_{kind}", f"output_type: {kind}", "dataset_path: json"]
        head += [f"dataset_kwargs: {data}", "test_split: test"]
        (folder / f"{kind}.yaml").write_text("\n".join([*head, *lines]) + "\n")


def _answers(folder: Path, task: str) -> list[str]:
    """The generated texts, or which choices are the most probable, in the order of the rows."""
    file = next(folder.rglob(f"samples_{task}_*.jsonl"))
    rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
    if "generate" in task:
        # The tokenizer of transformers drops a space at the beginning of what it decodes.
        return [row["resps"][0][0].strip() for row in rows]
    if "choice" in task:
        return [str([pair[0][1] for pair in row["resps"]]) for row in rows]
    return []
