"""A renderer on a tokenizer of bytes, and a recorded run."""

from __future__ import annotations

import byte_tokenizer
import pytest
from animal_stories import story_config
from homes import new_home
from train_runs import run

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="module")
def bytes_registered():
    with byte_tokenizer.registered():
        yield


@pytest.fixture(scope="module")
def renderer(bytes_registered):
    return get_renderer("role_colon", get_tokenizer(byte_tokenizer.NAME))


@pytest.fixture(scope="module")
def recorded(stories_model, tmp_path_factory):
    """A run of four steps with a checkpoint after the second; its folder and its rows."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_COOKBOOK_HOME", new_home(folder.parent / "home"))
        config = story_config(
            stories_model,
            folder,
            {"num_batches": 4, "groups_per_batch": 4, "group_size": 4, "test_groups": 2},
            max_tokens=12,
            save_every=2,
            eval_every=4,
            lora_rank=4,
        )
        yield folder, run(config)
