"""Keys: made once, kept for their user's eyes, one owner each."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.server.keys import KeyFile


def test_a_key_is_made_once_and_read_again(tmp_path):
    path = tmp_path / "keys.json"
    made = KeyFile(path, tmp_path).ensure(["local", "ann"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(key.startswith("tml-") and len(key) > 40 for key in made.values())
    again = KeyFile(path, tmp_path)
    assert again.ensure(["local", "ann"]) == {}
    for name, key in made.items():
        owner = again.owner_of(key)
        assert owner is not None
        assert owner.name == name
    for wrong in ("", "tml-", made["ann"][:-1], made["ann"] + "x", "tml-é"):
        assert again.owner_of(wrong) is None


def test_servers_that_start_at_once_agree(tmp_path):
    path = tmp_path / "keys.json"
    files = [KeyFile(path, tmp_path) for _ in range(8)]  # none has seen a key
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda file: file.ensure(["local"]), files))
    (key,) = [one["local"] for one in made if one]
    assert all(file.owner_of(key) is not None for file in files)
    assert json.loads(path.read_bytes()) == {"local": key}


def test_owners_have_folders_of_their_own(tmp_path):
    keys = KeyFile(tmp_path / "keys.json", tmp_path)
    made = keys.ensure(["local", "ann", "bob"])
    roots = {keys.owner_of(key).store.root for key in made.values()}
    assert roots == {tmp_path, tmp_path / "owners" / "ann", tmp_path / "owners" / "bob"}


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", ""])
def test_an_owner_cannot_be_a_path(tmp_path, name):
    with pytest.raises(CheckpointError, match="owner"):
        KeyFile(tmp_path / "keys.json", tmp_path).ensure([name])


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "keys.json"
    KeyFile(path, tmp_path).ensure(["local"])
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        KeyFile(path, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"local": 3}', '{"local": "short"}', "{"])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "keys.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"keys\.json"):
        KeyFile(path, tmp_path)


def test_a_file_may_name_no_path_as_owner(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"../x": "tml-abc"}))
    path.chmod(0o600)
    with pytest.raises(CheckpointError, match="owner"):
        KeyFile(path, tmp_path)
