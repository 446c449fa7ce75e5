"""Keys: made once, kept for their user's eyes, one owner each."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.server import keys as keys_module
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


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "keys.json"
    keys = KeyFile(path, tmp_path)
    made = keys.ensure(["local", "ann"])
    ann = keys.owner_of(made["ann"])
    assert keys.refresh() == []

    def write(text: str) -> None:
        path.with_suffix(".new").touch(0o600)
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)

    bob = "tml-" + "b" * 20
    # Ann's key is renewed by its deletion, bob is new; the damaged file changes nothing.
    write(json.dumps({"local": made["local"], "bob": bob}))
    assert keys.refresh() == ["ann", "bob"]
    renewed = json.loads(path.read_bytes())["ann"]
    assert keys.owner_of(made["ann"]) is None
    assert keys.owner_of(renewed) is ann  # with the open sessions
    assert keys.owner_of(bob) is not None
    write("{")
    with pytest.raises(ConfigurationError, match=r"keys\.json"):
        keys.refresh()
    path.unlink()
    assert keys.refresh() == []
    assert keys.owner_of(renewed) is ann
    write(json.dumps({"local": made["local"], "ann": renewed}))
    assert keys.refresh() == ["bob"]
    assert keys.owner_of(bob) is None
    assert keys.names == ["local", "ann"]


A, B = "a" * 16, "b" * 16


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        (f"local=tml-{A}, ann=tml-{B}=", {"local": f"tml-{A}", "ann": f"tml-{B}="}),
        (f"local=tml-{A},ann=secret", "entry 2 does not begin with tml-"),
        ("tml-secret", "entry 1"),
        (f"ann=tml-secret,ann=tml-{B}", "twice"),
        ("ann=tml-secret", "fewer than 16 characters"),
        (f"local=tml-{A}secret,ann=tml-{A}secret", "two owners"),
    ],
)
def test_keys_may_be_in_the_environment(tmp_path, monkeypatch, text, found):
    monkeypatch.setenv(keys_module.ENVIRONMENT, text)
    if isinstance(found, str):
        with pytest.raises(ConfigurationError, match=found) as error:
            keys_module.keys_of_environment()
        assert "secret" not in str(error.value)
        return
    assert keys_module.keys_of_environment() == found
    if found:
        keys = KeyFile(tmp_path / "keys.json", tmp_path, found)
        assert keys.ensure(["local"]) == {}
        assert keys.owner_of(f"tml-{B}=") is keys.owner("ann")
        assert not keys.path.exists()
