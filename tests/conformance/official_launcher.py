"""Runs a program of the official cookbook with generated rows in place of the Hub's data sets.

``python official_launcher.py MODULE key=value ...``. Services that need an account (a cloud
sandbox, a vector store) are replaced by small stand-ins; the program itself is not changed.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

import datasets

Row = dict[str, Any]


def sums(i: int) -> Row:
    return {
        "question": f"What is {i} + {i}?", "answer": f"Add them.\n#### {2 * i}",
        "problem": f"What is {i} + {i}?", "solution": f"It is \\boxed{{{2 * i}}}.",
        "final_answer": str(2 * i), "r1_solution_1": f"{2 * i}", "level": "Level 1",
        "type": "Algebra", "subject": "Algebra",
    }  # fmt: skip


def chats(i: int) -> Row:
    turns = [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}."}]
    return {"prompt": f"Hello {i}", "messages": turns}


def choices(i: int) -> Row:
    return {
        "question": f"What is {i} + {i}?", "answerKey": "B", "answer": "B", "type": "mcq-4-choices",
        "choices": {"text": ["0", str(2 * i), "7", "9"], "label": ["A", "B", "C", "D"]},
        "domain": "Chemistry", "details": {"level": "L3"},
    }  # fmt: skip


def pairs(i: int) -> Row:
    start = f"\n\nHuman: Name a colour, {i}.\n\nAssistant: "
    return {"chosen": f"{start}Red.", "rejected": f"{start}No."}


def programs(i: int) -> Row:
    tests = [{"input": str(i), "output": str(i), "testtype": "stdin_stdout"}]
    return {
        "problem": f"Print the number that you read, {i}.", "tests": json.dumps(tests),
        "starter_code": "", "metadata": "{}",
    }  # fmt: skip


def thoughts(i: int) -> Row:
    turns = [{"from": "human", "value": f"Say {i}."}, {"from": "gpt", "value": f"{i}."}]
    return {"conversations": turns}


def lines(i: int) -> Row:
    return {"text": f"The river and the city number {i} were in the time of the war . " * 20}


def judged(i: int) -> Row:
    scores = {f"orig_score{k}_description": f"It is worth {k}." for k in range(1, 6)}
    return {
        "orig_instruction": f"Say {i}.", "orig_criteria": "Is it said?",
        "orig_reference_answer": f"{i}.", **scores,
    }  # fmt: skip


def questions(i: int) -> Row:
    truth = {"ground_truth": {"target": [str(i)]}}
    source = ("nq", "hotpotqa")[i % 2]
    return {"question": f"Which number is {i}?", "data_source": source, "reward_model": truth}


ROWS: dict[str, Callable[[int], Row]] = {
    "gsm8k": sums, "DeepMath": sums, "MATH": sums, "math": sums, "Polaris": sums,
    "no_robots": chats, "tulu": chats, "hh-rlhf": pairs, "SciKnowEval": choices,
    "DeepCoder": programs, "OpenThoughts": thoughts, "wikitext": lines,
    "Feedback-Collection": judged,
}  # fmt: skip
_load_from_hub = datasets.load_dataset


def load_dataset(
    path: str, name: str | None = None, *args: Any, split: str | None = None, **kwargs: Any
) -> Any:
    """As ``datasets.load_dataset``, with generated rows for the data sets of the recipes."""
    make = next((make for part, make in ROWS.items() if part in path), None)
    if make is None:
        more = kwargs if split is None else {**kwargs, "split": split}
        return _load_from_hub(path, name, *args, **more)
    # Recipes take up to 1,024 rows as the test split of a single one.
    counts = {"train": 1200, "test": 160}
    found = datasets.DatasetDict(
        {key: datasets.Dataset.from_list([make(i) for i in range(n)]) for key, n in counts.items()}
    )
    if split is None:
        return found
    return found[split].to_iterable_dataset() if kwargs.get("streaming") else found[split]


def _replace_downloads() -> None:
    import huggingface_hub
    import pandas as pd

    from_hub = huggingface_hub.hf_hub_download

    def hf_hub_download(*args: Any, filename: str, local_dir: Any = None, **more: Any) -> str:
        if more.get("repo_type") != "dataset":
            return from_hub(*args, filename=filename, local_dir=local_dir, **more)
        target = f"{local_dir}/{filename}"
        pd.DataFrame([questions(i) for i in range(64)]).to_parquet(target)
        return target

    huggingface_hub.hf_hub_download = hf_hub_download


class _AnyName(types.ModuleType):
    """A module of a service's library, whose names stand in annotations only."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # which makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Any


class _Collection:
    async def query(self, query_embeddings: list[Any], n_results: int) -> Row:
        return {"documents": [["The number is itself."] * n_results for _ in query_embeddings]}


class _Chroma:
    async def get_collection(self, name: str) -> _Collection:
        return _Collection()


def _replace_vector_store() -> None:
    async def connect(**_: Any) -> _Chroma:
        return _Chroma()

    async def embed(client: Any, texts: list[str], *_: Any, **__: Any) -> list[list[float]]:
        return [[0.0] for _ in texts]

    names = ("chromadb", "chromadb.api", "chromadb.api.types", "chromadb.config")
    names += ("google.genai", "google.genai.types")
    for name in names:
        sys.modules[name] = _AnyName(name)
    google = importlib.import_module("google")  # of protobuf
    vars(google)["genai"] = sys.modules["google.genai"]
    vars(sys.modules["chromadb"])["AsyncHttpClient"] = connect
    vars(sys.modules["chromadb.config"])["Settings"] = dict
    embedding = types.ModuleType("official_recipes.search_tool.embedding")
    vars(embedding).update(get_gemini_client=lambda: None, get_gemini_embedding=embed)
    sys.modules[embedding.__name__] = embedding


def _replace_cloud_sandbox() -> None:
    """Commands of Harbor's tasks run in a local sandbox instead of Modal's."""
    from tinker_cookbook.sandbox import modal_sandbox
    from tinker_cookbook.sandbox.local_sandbox import LocalSandbox

    class Image:
        @staticmethod
        def from_dockerfile(**_: Any) -> None: ...

    async def create(**_: Any) -> LocalSandbox:
        return await LocalSandbox.create()

    modal = _AnyName("modal")
    vars(modal)["Image"] = Image
    sys.modules["modal"] = modal
    modal_sandbox.ModalSandbox.create = create  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    datasets.load_dataset = load_dataset
    module = sys.argv[1]
    if ".search_tool." in module:
        _replace_downloads()
        _replace_vector_store()
    if "harbor" in module:
        _replace_cloud_sandbox()
    sys.argv = [module, *sys.argv[2:]]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
