"""Prepares Expresso, read speech in several styles, as WAV files of 16 kHz and JSONL files.

    python -m recipes.audio.emotion.prepare_data data_path=FOLDER

Downloads the release (36 GB, with curl) unless ``FOLDER/expresso`` or ``FOLDER/expresso.tar`` is
there, and writes ``FOLDER/expresso_16khz`` (with ffmpeg). What is done is not repeated.

The training part becomes ``sft_train``, each sentence once with the styles in balance, and
``rl_train``, other recordings.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import tarfile
import wave
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.audio.grading import normalize_text
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

EXPRESSO_URL = "https://dl.fbaipublicfiles.com/textless_nlp/expresso/data/expresso.tar"
EXPRESSO_MD5 = "6bf580a4cd4392ae2473626147b5307c"
SAMPLE_RATE = 16_000
SPLITS = ("train", "dev", "test")
SHUFFLE_SEED = 0  # the release lists the recordings by style
N_SFT_CLIPS, N_RL_CLIPS = 1_600, 800  # as many as the official recipes train on

Clip = tuple[str, Path]
"""Name of a recording, and its WAV file in the release."""


@chz.chz
class Config:
    """Settings of the program."""

    data_path: str = chz.field(
        default="~/.cache/tinker-cookbook/audio-data", doc="Folder of the release and the output"
    )


def download_and_extract(data_path: Path) -> Path:
    """Returns the folder of the release; downloads and unpacks what is missing."""
    root, tar = data_path / "expresso", data_path / "expresso.tar"
    if (root / "read_transcriptions.txt").exists():
        return root
    data_path.mkdir(parents=True, exist_ok=True)
    _require("curl", f"or put the release at {tar}")
    # Continues a download that was cut off.
    subprocess.run(["curl", "-L", "-C", "-", "-o", str(tar), EXPRESSO_URL], check=True)
    with tar.open("rb") as file:
        digest = hashlib.file_digest(file, "md5").hexdigest()
    if digest != EXPRESSO_MD5:
        raise DataValidationError(
            f"{tar}: got the MD5 {digest}, expected {EXPRESSO_MD5}; delete the file and start again"
        )
    with tarfile.open(tar) as archive:
        archive.extractall(data_path, filter="data")
    return root


def prepare(expresso_root: Path, out_dir: Path) -> None:
    """Writes the WAV files and, for each part, ``PART.jsonl``."""
    lines = (expresso_root / "read_transcriptions.txt").read_text("utf-8").splitlines()
    texts = {name: text for name, _, text in (line.partition("\t") for line in lines)}
    # read/SPEAKER/STYLE/base/NAME.wav; only the short recordings have texts.
    files = {p.stem: p for p in (expresso_root / "audio_48khz" / "read").glob("*/*/base/*.wav")}
    parts = {split: _clips(expresso_root, split, texts, files) for split in SPLITS}
    train = parts.pop("train")
    chosen = set(
        _balanced_unique_indices(
            [normalize_text(texts[name]) for name, _ in train], [_style(path) for _, path in train]
        )
    )
    parts["sft_train"] = [clip for i, clip in enumerate(train) if i in chosen][:N_SFT_CLIPS]
    parts["rl_train"] = [clip for i, clip in enumerate(train) if i not in chosen][:N_RL_CLIPS]
    (out_dir / "wav").mkdir(parents=True, exist_ok=True)
    for part, clips in parts.items():

        def row(clip: Clip) -> str:
            name, path = clip
            found = {"id": name, "text": texts[name].strip(), "emotion": _style(path)}
            frames = _transcode(path, out_dir / "wav" / f"{name}.wav")
            found |= {"path": f"wav/{name}.wav", "num_frames": frames, "sample_rate": SAMPLE_RATE}
            return json.dumps(found) + "\n"

        with ThreadPoolExecutor(16) as pool:
            text = "".join(pool.map(row, clips))
        (out_dir / f"{part}.jsonl").write_text(text, "utf-8")
        print_line(f"{out_dir / part}.jsonl: {len(clips)} recordings")


def _clips(root: Path, split: str, texts: dict[str, str], files: dict[str, Path]) -> list[Clip]:
    lines = (root / "splits" / f"{split}.txt").read_text("utf-8").splitlines()
    names = [line.partition("\t")[0] for line in lines]
    clips = [(name, files[name]) for name in names if name in files and name in texts]
    random.Random(SHUFFLE_SEED).shuffle(clips)
    return clips


def _style(path: Path) -> str:
    return path.parent.parent.name


def _balanced_unique_indices(texts: Sequence[str], styles: Sequence[str]) -> list[int]:
    """Returns one index for each text: of the style that is rarest so far, the first if equal."""
    by_text: dict[str, list[int]] = {}
    for i, text in enumerate(texts):
        by_text.setdefault(text, []).append(i)
    counts: Counter[str] = Counter()
    chosen: list[int] = []
    for indices in by_text.values():
        chosen.append(min(indices, key=lambda i: counts[styles[i]]))
        counts[styles[chosen[-1]]] += 1
    return chosen


def _transcode(source: Path, target: Path) -> int:
    """Writes 16 kHz, 16 bits, one channel, unless it is there; returns the number of frames."""
    if not target.exists():
        # Renamed when it is complete, so that a run that is stopped leaves no half of a file.
        part = target.with_suffix(".part.wav")
        command = ["ffmpeg", "-nostdin", "-v", "error", "-y", "-i", str(source)]
        command += ["-ar", str(SAMPLE_RATE), "-ac", "1", "-c:a", "pcm_s16le", str(part)]
        subprocess.run(command, check=True)
        part.replace(target)
    with wave.open(str(target), "rb") as file:
        return file.getnframes()


def _require(program: str, otherwise: str) -> None:
    if shutil.which(program) is None:
        raise ConfigurationError(f"the program {program} is not installed; install it, {otherwise}")


def main(config: Config) -> None:
    """Prepares the data."""
    data_path = Path(config.data_path).expanduser()
    _require("ffmpeg", "as with: apt install ffmpeg")
    prepare(download_and_extract(data_path), data_path / "expresso_16khz")


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
