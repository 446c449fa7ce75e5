"""Fixtures shared by all tests: where the trial models, tokenizers and data lie."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from homes import new_home
from hypothesis.internal.conjecture import providers

pytest.register_assert_rewrite("recipe_runs")

# Hypothesis draws some values from the constants of whatever modules are loaded: with them, a check
# that asks for the same examples at every run would see others in every selection of the tests.
providers._get_local_constants = providers.Constants

# Two workers on two cores, each with threads for both, spend most of their time on waking threads.
# torch and the programs that tests start read it.
os.environ["OMP_NUM_THREADS"] = "1"
# Without bytecode, each program that a test starts compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

REPO = Path(__file__).resolve().parent.parent
_numbers = itertools.count()
SHARED = Path(os.environ.get("TINKER_COOKBOOK_SHARED", REPO.parent / "shared"))


# Tests of leaves (optional features, see test_import_structure.py) and of benchmarks: folders and
# beginnings of file names below tests/unit. They have the mark "leaf", so that `make test` leaves
# them out.
LEAF_TESTS = (
    "capture/",
    "chat/",
    "doctor/",
    "engine/quantized_checks/",
    "engine/test_batch_shares",
    "engine/test_bench",
    "engine/test_data_parallel",
    "engine/test_joint_training",
    "engine/test_quantized",
    "engine/test_router_replay",
    "engine/test_vllm_sampler",
    "eval/test_inspect",
    "preference/test_dpo_bench",
    "renderers/test_renderer_bench",
    "renderers/test_show",
    "rl/test_fork",
    "rl/test_replay",
    "rl/test_rl_bench",
    "sandbox/",
    "server/openai/test_chat_",
    "server/openai/test_openai_constraints",
    "server/openai/test_openai_responses",
    "server/test_server_bench",
    "supervised/test_batch_replay",
    "supervised/test_data_report",
    "supervised/test_viz_sft_dataset",
    "sweep/",
    "test_runs_command",
    "test_schema_masks",
    "test_structured_output",
    "test_tool_call_grammars",
    "view/",
    "weights/test_gguf",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests of leaves, and puts files with slow tests first.

    Else one worker would be alone with a long file at the end.
    """
    leaves = tuple(str(REPO / "tests" / "unit" / path) for path in LEAF_TESTS)
    for item in items:
        if str(item.path).startswith(leaves):
            item.add_marker("leaf")
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Default folders of runs are in the folder of this test run, before a module names them."""
    folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    os.environ["TINKER_COOKBOOK_RUNS_DIR"] = str(folder / "default-runs")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of trial models, tokenizers and data next to the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"trial data is absent: {SHARED} (set TINKER_COOKBOOK_SHARED)")
    return SHARED


@pytest.fixture(scope="session")
def stories_model(shared_dir: Path) -> str:
    """Folder of the trained 260k-parameter Llama."""
    return str(shared_dir / "models" / "stories260k")


@pytest.fixture(scope="session")
def tokenizer_folder(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """``tokenizer_folder("qwen3")`` gives a folder that ``AutoTokenizer`` can load."""
    made: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in made:
            target = tmp_path_factory.mktemp(f"tokenizer-{family}")
            for source in (shared_dir / "tokenizers" / family).iterdir():
                if source.suffix == ".gz":
                    with gzip.open(source, "rb") as packed, open(target / source.stem, "wb") as out:
                        shutil.copyfileobj(packed, out)
                else:
                    shutil.copy(source, target / source.name)
            made[family] = str(target)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def vision_tokenizer(tokenizer_folder, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with tokenizer, template and image processor of Qwen3-VL, without weights."""
    folder = tmp_path_factory.mktemp("tokenizer-qwen3-vl")
    source = Path(tokenizer_folder("qwen3"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    shutil.copy(source / "chat_template.qwen3_vl.jinja", folder / "chat_template.jinja")
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16}
    processor |= {"merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


@pytest.fixture(scope="session")
def demo_model() -> str:
    """Folder of the demo model, fetched once and kept between test runs."""
    from tinker_cookbook.demo.model import make_copy
    from tinker_cookbook.exceptions import WeightsDownloadError

    try:
        return str(make_copy(Path("~/.cache/tinker_cookbook_tests/models").expanduser()))
    except WeightsDownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(autouse=True)
def _isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """No test writes into the user's own checkpoint root, calls the hosted API or the hub."""
    # Not by mktemp, which lists the folders of all earlier tests to find a new name.
    home = tmp_path_factory.getbasetemp() / "homes" / str(next(_numbers))
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(home))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
