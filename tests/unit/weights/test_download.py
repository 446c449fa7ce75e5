"""Checkpoints fetched from this disk and from a server (20 s: one server of the story model)."""

from __future__ import annotations

import io
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
from safetensors.torch import load_file
from serving import Serving
from tinker import types

from tinker_cookbook import weights
from tinker_cookbook.backends import connect
from tinker_cookbook.exceptions import WeightsDownloadError
from tinker_cookbook.weights._download import _fetch_remote, extract_archive
from tinker_cookbook.weights.proof import prompt_tokens, reference_logprobs

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def trained(service, model: str):
    """A run that stepped once."""
    datum = tinker.Datum(
        model_input=types.ModelInput.from_ints([1, 44, 101]),
        loss_fn_inputs={"target_tokens": np.array([44, 101, 7]), "weights": np.ones(3, np.float32)},
    )
    client = service.create_lora_training_client(model, rank=4, seed=0)
    client = client.result() if hasattr(client, "result") else client
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return client


def test_from_this_disk(stories_model, tmp_path):
    with connect("local", device="cpu", dtype="float32") as connection:
        client = trained(connection.service, stories_model)
        path = client.save_weights_for_sampler("a").result().path
        prompts = prompt_tokens(weights.open_checkpoint(path))
        sampling = connection.service.create_sampling_client(model_path=path)
        expected = [
            sampling.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
            for tokens in prompts
        ]
    out = weights.download(tinker_path=path, output_dir=str(tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES
    # The reference is what the engine's sampling client computes, whichever way it is opened.
    for checkpoint in (weights.open_checkpoint(path), weights.open_checkpoint(out)):
        found = reference_logprobs(checkpoint, prompts, "cpu")
        for scores, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(scores.logprobs, wanted, atol=2e-5)
    # Files of the same names are replaced, others stay.
    (tmp_path / "out" / "notes.txt").write_text("mine")
    weights.download(tinker_path=path, output_dir=str(tmp_path / "out"))
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    with pytest.raises(WeightsDownloadError, match="no such checkpoint"):
        weights.download(tinker_path=f"{path}x", output_dir=str(tmp_path / "other"))
    with pytest.raises(WeightsDownloadError, match="expected tinker://RUN"):
        weights.download(tinker_path="a/b", output_dir=str(tmp_path / "other"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
def test_from_a_server(stories_model, tmp_path, monkeypatch):
    serving = Serving(tmp_path / "root", {"model_name": stories_model}).start()
    monkeypatch.setenv("TINKER_API_KEY", serving.key())
    try:
        with connect(serving.url) as connection:
            client = trained(connection.service, stories_model)
            path = client.save_weights_for_sampler("a").result().path
        out = weights.download(
            tinker_path=path, output_dir=str(tmp_path / "out"), base_url=serving.url
        )
        assert load_file(f"{out}/adapter_model.safetensors")
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES
        opened = weights.open_checkpoint(path, base_url=serving.url)
        assert opened.base_model == stories_model
        assert opened.updates.keys() == weights.open_checkpoint(out).updates.keys()
        with pytest.raises(WeightsDownloadError, match="no such checkpoint"):
            weights.download(
                tinker_path=f"{path}x", output_dir=str(tmp_path / "none"), base_url=serving.url
            )
    finally:
        serving.stop()


def test_weights_of_the_hosted_service_are_exported_for_the_download(tmp_path, monkeypatch):
    """Its service has addresses of external weights alone."""
    path, exported = "tinker://r/weights/a", "tinker://r/external_weights/download"
    deleted = []
    (tmp_path / "file").write_bytes(b"content")

    def urls(asked: str):
        if asked != exported:
            raise ValueError("not external weights")
        return done(SimpleNamespace(urls={"adapter_config.json": (tmp_path / "file").as_uri()}))

    def done(value=None):
        return SimpleNamespace(result=lambda: value)

    rest = SimpleNamespace(
        get_external_weights_urls=urls, delete_checkpoint_from_tinker_path=lambda p: (
            deleted.append(p), done())[1],
    )  # fmt: skip
    client = SimpleNamespace(
        save_weights_external=lambda name, ttl_seconds: done(SimpleNamespace(path=exported))
    )
    monkeypatch.setattr("tinker_cookbook.weights._download._archive_url", lambda *_: None)
    service = SimpleNamespace(
        create_rest_client=lambda: rest, create_training_client_from_state=lambda p: done(client)
    )
    (tmp_path / "out").mkdir()
    _fetch_remote(service, None, path, tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").read_bytes() == b"content"
    assert deleted == [exported]
    with pytest.raises(WeightsDownloadError, match="no download URL"):
        _fetch_remote(service, None, "tinker://r/sampler_weights/a", tmp_path / "out")


def archive_of(*entries: tarfile.TarInfo) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for entry in entries:
            entry.size = 3 if entry.isfile() else 0
            archive.addfile(entry, io.BytesIO(b"abc") if entry.isfile() else None)
    packed.seek(0)
    return packed


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


@pytest.mark.parametrize(
    "bad",
    [
        entry("../outside"),
        entry("/tmp/outside"),
        entry("a/../../outside"),
        entry("link", tarfile.SYMTYPE, "/etc/passwd"),
        entry("hard", tarfile.LNKTYPE, "a.json"),
    ],
    ids=lambda bad: bad.name,
)
def test_an_archive_that_reaches_outside_is_refused(tmp_path, bad):
    with pytest.raises(WeightsDownloadError, match="malicious"):
        extract_archive(archive_of(bad), tmp_path)
