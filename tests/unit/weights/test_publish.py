"""Cards from a run's folder, and uploads to a Hub on this machine (6 s)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from exports import make_adapter, make_base

from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsError
from tinker_cookbook.weights.__main__ import main
from tinker_cookbook.weights.proof import file_digest

URL = "http://hub"


class Hub:
    """A Hub in memory: ``files["me/model"]`` are the uploaded files."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}

    def __call__(self, endpoint: str, token: str | None) -> Hub:
        self.endpoint, self.token = endpoint, token
        return self

    def create_repo(self, *, repo_id: str, private: bool, exist_ok: bool, **_: object) -> None:
        if self.token == "hf_wrong":
            raise OSError("401 Client Error.\nRequest ID: 1")
        assert exist_ok
        self.private.setdefault(repo_id, private)

    def upload_folder(
        self, *, folder_path: str, repo_id: str, ignore_patterns: list[str], **_: object
    ) -> None:
        assert ignore_patterns == [".*"]
        kept = (path for path in Path(folder_path).iterdir() if not path.name.startswith("."))
        self.files[repo_id] = {path.name: path.read_bytes() for path in kept}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", found := Hub())
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    base = make_base(folder / "base", "llama")
    adapter = make_adapter(folder / "adapter", base)
    main(["export", str(adapter), f"out={folder / 'out'}"])
    return folder / "out"


@pytest.fixture
def export(exported, tmp_path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "export"))


def test_every_file_of_an_export_is_committed(hub, export):
    (export / ".editor.swp").write_text("not for others")
    url = weights.publish_to_hf_hub(model_path=str(export), repo_id="me/model", endpoint=URL)
    assert url == f"{URL}/me/model"
    assert hub.private == {"me/model": True}
    expected = {p.name: p.read_bytes() for p in export.iterdir() if not p.name.startswith(".")}
    assert hub.files["me/model"] == expected
    assert expected.keys() >= {"README.md", "proof.json", "adapter_model.safetensors"}
    # Again, into the repository that is there now.
    weights.publish_to_hf_hub(model_path=str(export), repo_id="me/model", endpoint=URL)


def test_a_public_repository_and_a_card_of_our_own(hub, export):
    (export / "README.md").unlink()
    card = weights.ModelCardConfig(
        base_model="org/base", datasets=["a/b"], tags=["sft"], license="mit", language=["en"]
    )
    weights.publish_to_hf_hub(
        model_path=str(export), repo_id="me/model", private=False,
        model_card=card, endpoint=URL,
    )  # fmt: skip
    assert hub.private == {"me/model": False}
    found = huggingface_hub.ModelCard(hub.files["me/model"]["README.md"].decode())
    data = found.data.to_dict()
    assert data["base_model"] == "org/base"
    assert (data["license"], data["language"], data["datasets"]) == ("mit", ["en"], ["a/b"])
    assert data["tags"] == ["tinker", "tinker-cookbook", "peft", "lora", "sft"]
    assert data["library_name"] == "peft"
    assert 'PeftModel.from_pretrained(base, "me/model")' in found.text
    assert "LoRA adapter, float32" in found.text


def test_nothing_is_sent_of_an_export_that_disagrees(hub, export, monkeypatch):
    proof = json.loads((export / "proof.json").read_text())
    proof["comparisons"][0]["largest"] = 0.02
    (export / "proof.json").write_text(json.dumps(proof))
    with pytest.raises(WeightsError, match="disagrees with the engine"):
        weights.publish_to_hf_hub(model_path=str(export), repo_id="me/m", endpoint=URL)
    (export / "proof.json").unlink()
    with pytest.raises(WeightsError, match="no comparison with the engine"):
        main(["publish", str(export), "repo_id=me/m"])
    with pytest.raises(FileNotFoundError, match="expected the folder of an export"):
        weights.publish_to_hf_hub(model_path="/nowhere", repo_id="me/m", endpoint=URL)
    assert not hub.private


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("adapter_model.safetensors", "zeros", "was changed"),
        ("adapter_config.json", "text", "was changed"),
        ("adapter_config.json", "delete", "is missing"),
        ("generation_config.json", "text", "was changed"),
        ("chat_template.jinja", "add", "was added"),
        ("m.gguf", "gguf", "was changed"),
        ("other.gguf", "add", "was added"),
        ("README.md", "text", ""),
        ("curves.png", "add", ""),
        ("LICENSE", "add", ""),
        ("m.Modelfile", "add", ""),
    ],
)
def test_only_the_files_that_were_compared_are_published(hub, export, name, change, words):
    path = export / name
    if name.endswith(("gguf", "Modelfile")):  # a folder of GGUF files, whose proofs have names
        proof = json.loads((export / "proof.json").read_text())
        for left in export.iterdir():
            left.unlink()
        (export / "m.gguf").write_bytes(b"GGUF")
        proof["files"] = {"m.gguf": file_digest(export / "m.gguf")}
        (export / "m.proof.json").write_text(json.dumps(proof))
    if change == "zeros":  # of the same size
        content = bytearray(path.read_bytes())
        content[-1000:] = bytes(1000)
        path.write_bytes(content)
    elif change == "delete":
        path.unlink()
    else:
        path.write_text(f"{path.read_text() if path.is_file() else ''} ")
    how = {"model_path": str(export), "repo_id": "me/m", "endpoint": URL}
    if words:
        with pytest.raises(WeightsError, match=rf"{name} {words}.*unverified=True"):
            weights.publish_to_hf_hub(**how)
        assert not hub.private
    weights.publish_to_hf_hub(**how, unverified=bool(words))
    assert (name in hub.files["me/m"]) == path.is_file()


def test_an_upload_that_fails_says_why(hub, export):
    with pytest.raises(WeightsError, match=r"401 Client Error. Check .*HF_TOKEN"):
        weights.publish_to_hf_hub(
            model_path=str(export), repo_id="me/model", token="hf_wrong", endpoint=URL
        )


def test_a_card_has_data_settings_curves_results_and_commit(export, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    config = {
        "recipe_name": "sl_basic", "learning_rate": 1e-3, "lora_rank": 8, "log_path": str(run),
        "base_url": "http://secret", "dataset_builder": {"_type": "x:Y", "common_config": {
            "batch_size": 4}, "file_path": "/home/me/rows.jsonl"},
    }  # fmt: skip
    (run / "config.json").write_text(json.dumps(config))
    rows = [{"step": i, "train_mean_nll": 3 - i / 10} for i in range(30)]
    rows[10]["test/nll"], rows[29]["test/nll"] = 2.5, 1.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "code.diff").write_text("# checkout: /home/me/code\n# commit: abc123\ndiff --git a b\n")
    for name, metrics in (("gsm8k", {"ci_low": 0.41, "ci_high": 0.59}), ("mmlu", {})):
        (tmp_path / "evals" / name).mkdir(parents=True)
        result = {"name": name, "score": 0.5, "num_examples": 100, "num_correct": 50,
                  "num_errors": 0, "metrics": metrics}  # fmt: skip
        (tmp_path / "evals" / name / "result.json").write_text(json.dumps(result))
    main(["card", str(export), f"log_path={run}", f"evals={tmp_path / 'evals'}",
          "license=apache-2.0", "repo_id=me/model"])  # fmt: skip
    text = (export / "README.md").read_text()
    for line in (
        "license: apache-2.0",
        "# me/model",
        "| file_path | rows.jsonl |",
        "| learning_rate | 0.001 |",
        "| 29 | 0.1 | 1.5 |",
        "| gsm8k | 100 | 0.500 | 0.410 to 0.590 | 0 |",
        "| mmlu | 100 | 0.500 | 0.404 to 0.596 | 0 |",  # Wilson's interval of 50 of 100
        "Commit `abc123`, with uncommitted changes.",
        "LoRA adapter, float32",
    ):
        assert line in text, line
    for private in ("/home/me", "http://secret", str(tmp_path / "run")):
        assert private not in text
