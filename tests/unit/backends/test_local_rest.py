"""The local rest client answers as ``tinker.RestClient`` does."""

from __future__ import annotations

import inspect
import tarfile
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
import tinker
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from tinker import types
from transformers import AutoModelForCausalLM

from tinker_cookbook.backends.local_rest import LocalRestClient
from tinker_cookbook.backends.protocols import RestClient
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, RunInfo
from tinker_cookbook.exceptions import BackendError, CheckpointError, ConfigurationError


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> CheckpointStore:
    """Run ``b`` is younger than run ``a``; each has two checkpoints of each kind."""
    store = CheckpointStore(tmp_path / "root", clock)
    for run_id, rank in (("a", 4), ("b:train:0", 8)):
        clock.now += 1
        metadata = {"renderer_name": run_id}
        store.create_run(run_id, RunInfo("org/model", rank, False, user_metadata=metadata))
        for name in ("step-1", "step-2"):
            for kind in ("weights", "sampler_weights"):
                clock.now += 1
                store.write_checkpoint(
                    run_id,
                    kind,
                    name,
                    adapter={"x": torch.zeros(3)},
                    adapter_config={},
                    user_metadata={"n": name},
                )
    return store


@pytest.fixture
def rest(store: CheckpointStore) -> LocalRestClient:
    return LocalRestClient(store)


def test_it_is_a_rest_client_with_the_sdks_signatures(rest: LocalRestClient) -> None:
    assert isinstance(rest, RestClient)
    own = {"copy_out", "get_checkpoint_archive_url", "get_checkpoint_archive_url_from_tinker_path"}
    for name, method in inspect.getmembers(LocalRestClient, inspect.isfunction):
        if not name.startswith("_") and not name.endswith("_async") and name not in own:
            theirs = inspect.signature(getattr(tinker.RestClient, name)).parameters
            ours = inspect.signature(method).parameters
            assert list(ours) == list(theirs), name
            assert [p.default for p in ours.values()] == [p.default for p in theirs.values()], name


def test_training_run(rest: LocalRestClient, clock: Clock, store: CheckpointStore) -> None:
    clock.now += 50
    store.write_checkpoint("b:train:0", "external_weights", "x", adapter={}, adapter_config={})
    run = rest.get_training_run("b:train:0").result()
    assert isinstance(run, types.TrainingRun)
    assert (run.training_run_id, run.base_model) == ("b:train:0", "org/model")
    assert (run.is_lora, run.lora_rank, run.corrupted) == (True, 8, False)
    assert run.user_metadata == {"renderer_name": "b:train:0"}
    assert run.last_request_time == datetime.fromtimestamp(clock.now, UTC)
    assert run.last_checkpoint is not None
    assert run.last_sampler_checkpoint is not None
    assert run.last_checkpoint.tinker_path == "tinker://b:train:0/weights/step-2"
    assert run.last_sampler_checkpoint.checkpoint_type == "sampler"
    assert rest.get_training_run_by_tinker_path("tinker://a/weights/gone").result().lora_rank == 4
    with pytest.raises(CheckpointError, match="not among the 2 runs"):
        rest.get_training_run("c").result()


def test_runs_are_listed_newest_first_by_page(rest: LocalRestClient) -> None:
    response = rest.list_training_runs().result()
    assert isinstance(response, types.TrainingRunsResponse)
    assert [run.training_run_id for run in response.training_runs] == ["b:train:0", "a"]
    page = rest.list_training_runs(limit=1, offset=1).result()
    assert [run.training_run_id for run in page.training_runs] == ["a"]
    assert page.cursor == types.Cursor(offset=1, limit=1, total_count=2)
    with pytest.raises(BackendError, match="project_id: got 'p'"):
        rest.list_training_runs(project_id="p")
    with pytest.raises(ConfigurationError, match="limit, offset: got 0, 0"):
        rest.list_training_runs(limit=0)


def test_checkpoints_are_listed(rest: LocalRestClient) -> None:
    response = rest.list_checkpoints("a").result()
    assert isinstance(response, types.CheckpointsListResponse)
    ids = ["weights/step-1", "sampler_weights/step-1", "weights/step-2", "sampler_weights/step-2"]
    assert [c.checkpoint_id for c in response.checkpoints] == ids
    first = response.checkpoints[0]
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(first.tinker_path)
    assert (parsed.checkpoint_id, parsed.checkpoint_type) == (first.checkpoint_id, "training")
    assert (first.public, first.expires_at, first.user_metadata) == (False, None, {"n": "step-1"})
    assert first.size_bytes is not None
    assert first.size_bytes > 12

    page = rest.list_user_checkpoints(limit=3, offset=3).result()
    assert [c.tinker_path for c in page.checkpoints] == [
        "tinker://b:train:0/weights/step-1",
        "tinker://a/sampler_weights/step-2",
        "tinker://a/weights/step-2",
    ]
    assert page.cursor == types.Cursor(offset=3, limit=3, total_count=8)


def test_deleting_and_ttl(rest: LocalRestClient, clock: Clock) -> None:
    rest.delete_checkpoint("a", "weights/step-1").result()
    rest.delete_checkpoint_from_tinker_path("tinker://a/sampler_weights/step-1").result()
    assert len(rest.list_checkpoints("a").result().checkpoints) == 2
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        rest.delete_checkpoint("a", "weights/step-1").result()

    path = "tinker://a/weights/step-2"
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    expires = rest.list_checkpoints("a").result().checkpoints[0].expires_at
    assert expires == datetime.fromtimestamp(clock.now + 3600, UTC)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.list_checkpoints("a").result().checkpoints[0].expires_at is None
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    clock.now += 3600
    ids = [c.checkpoint_id for c in rest.list_checkpoints("a").result().checkpoints]
    assert ids == ["sampler_weights/step-2"]


def test_peft_loads_what_is_copied_out(store, rest, stories_model: str, tmp_path: Path) -> None:
    """The adapter that peft reads back from the folder or the archive is the one saved."""
    base = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(base, config).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        wanted = model(tokens).logits
    described = {**config.to_dict(), "base_model_name_or_path": stories_model}
    described["target_modules"] = sorted(described["target_modules"])
    path = store.write_checkpoint(
        "a",
        "sampler_weights",
        "peft",
        adapter=get_peft_model_state_dict(model),
        adapter_config={k: getattr(v, "value", v) for k, v in described.items()},
        ttl_seconds=60,
    )

    copied = rest.copy_out(path, tmp_path / "copy").result()
    archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    assert archive.url.startswith("file://")
    assert archive.expires == datetime.fromtimestamp(store.clock.now + 60, UTC)
    fetched, _ = urllib.request.urlretrieve(archive.url, tmp_path / "fetched.tar")
    with tarfile.open(fetched) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    for folder in (copied, tmp_path / "unpacked"):
        fresh = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(fresh, str(folder)).eval()
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, wanted)
