"""Grading of transcripts, and preparation of Expresso with a stand-in for ffmpeg (1 s)."""

from __future__ import annotations

import json
import os
import wave

import pytest

from recipes.audio import grading
from recipes.audio.emotion import prepare_data
from tinker_cookbook.exceptions import ConfigurationError


@pytest.mark.parametrize(
    ("refs", "hyps", "rate"),
    [
        (["a b c d", "x"], ["a b c d", "y"], 0.2),  # one error of five words, no mean of rates
        (["Don't STOP (me) now!"], ["don't stop me"], 0.25),
        (["a b"], ["x a y b z"], 1.5),
        (["", "a b"], ["ignored", "a b"], 0.0),
        ([], [], 0.0),
    ],
)
def test_word_error_rates(refs, hyps, rate):
    assert grading.corpus_wer(refs, hyps) == pytest.approx(rate)
    if len(refs) == 1:
        assert grading.clip_wer(refs[0], hyps[0]) == pytest.approx(rate)


# A stand-in that writes its last argument: 16 frames of silence.
FFMPEG = """#!/usr/bin/env python3
import sys, wave
with wave.open(sys.argv[-1], "wb") as out:
    out.setnchannels(1), out.setsampwidth(2), out.setframerate(16000)
    out.writeframes(bytes(32))
"""


def test_parts_of_expresso(tmp_path, monkeypatch):
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigurationError, match="ffmpeg is not installed"):
            prepare_data.main(prepare_data.Config(data_path=str(tmp_path)))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ffmpeg").write_text(FFMPEG)
    (tmp_path / "bin" / "ffmpeg").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    root = tmp_path / "expresso"
    (root / "splits").mkdir(parents=True)
    names = {"train": [], "dev": [], "test": []}
    texts = []
    for i in range(8):
        part = "train" if i < 6 else "dev"
        style = ("happy", "sad")[i % 2]
        path = root / "audio_48khz" / "read" / "ex01" / style / "base" / f"clip{i}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        names[part].append(f"clip{i}")
        texts.append(f"clip{i}\tSentence {i // 2}.\n")  # each sentence in both styles
    (root / "read_transcriptions.txt").write_text("".join(texts))
    for part, found in names.items():
        (root / "splits" / f"{part}.txt").write_text("".join(f"{n}\n" for n in [*found, "none"]))
    prepare_data.main(prepare_data.Config(data_path=str(tmp_path)))
    out = tmp_path / "expresso_16khz"
    rows = {
        part: [json.loads(line) for line in (out / f"{part}.jsonl").read_text().splitlines()]
        for part in ("sft_train", "rl_train", "dev", "test")
    }
    assert {part: len(found) for part, found in rows.items()} == {
        "sft_train": 3, "rl_train": 3, "dev": 2, "test": 0,
    }  # fmt: skip
    assert len({row["text"] for row in rows["sft_train"]}) == 3
    assert {row["emotion"] for row in rows["sft_train"]} == {"happy", "sad"}
    assert not {r["id"] for r in rows["sft_train"]} & {r["id"] for r in rows["rl_train"]}
    first = rows["sft_train"][0]
    with wave.open(str(out / first["path"])) as file:
        assert (file.getnframes(), first["num_frames"], first["sample_rate"]) == (16, 16, 16000)
