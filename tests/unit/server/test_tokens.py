"""Tokens: who gets one, what it says, and what ends it."""

from __future__ import annotations

import base64
import json

import httpx
import pytest

from tinker_cookbook.server.keys import (
    TOKEN_SECONDS,
    KeyFile,
    is_valid_token,
    issue_token,
    unverified_owner,
)

KEY = "tml-" + "k" * 40


def _forged(token: str, **claims) -> str:
    head, body, signature = token.split(".")
    said = {**json.loads(base64.urlsafe_b64decode(body + "==")), **claims}
    again = base64.urlsafe_b64encode(json.dumps(said).encode()).rstrip(b"=").decode()
    return f"{head}.{again}.{signature}"


def test_a_token_holds_for_its_hours_under_its_key_alone():
    token = issue_token("ann", KEY, now=1000)
    assert unverified_owner(token) == "ann"
    assert is_valid_token(token, KEY, now=1000 + TOKEN_SECONDS - 1)
    assert not is_valid_token(token, KEY, now=1000 + TOKEN_SECONDS)
    assert not is_valid_token(token, KEY + "x", now=1000)
    for change in ({"sub": "tml:user:bob"}, {"exp": 10**12}):
        assert not is_valid_token(_forged(token, **change), KEY, now=1000), change


@pytest.mark.parametrize(
    "text", ["eyJ", "eyJ.", "eyJ..", "eyJ.ä.b", "eyJ.W10.x", "eyJhIjoxfQ.e30."]
)
def test_invalid_tokens_are_refused(tmp_path, text):
    keys = KeyFile(tmp_path / "keys.json", tmp_path)
    keys.ensure(["local"])
    assert keys.owner_of(text) is None


def test_a_token_of_one_owner_is_not_anothers(tmp_path):
    keys = KeyFile(tmp_path / "keys.json", tmp_path)
    made = keys.ensure(["local", "ann"])
    ann = keys.owner("ann")
    assert keys.owner_of(keys.token_of(ann)) is ann
    assert keys.owner_of(issue_token("local", made["ann"])) is None
    assert keys.owner_of(issue_token("nobody", made["ann"])) is None
    unsigned = issue_token("ann", made["ann"]).rpartition(".")[0] + "."
    assert keys.owner_of(unsigned) is None
    (tmp_path / "keys.json").unlink()
    new = KeyFile(tmp_path / "keys.json", tmp_path)
    new.ensure(["ann"])
    assert new.owner_of(issue_token("ann", made["ann"])) is None  # the key was taken out


def test_a_token_does_what_its_key_does(serving, caller):
    status, said = caller("ann").post("auth/token")
    assert status == 200
    with_token = caller(key=said["jwt"])
    session = with_token.session()
    assert caller("ann").get("sessions")[1]["sessions"] == [session]
    assert caller("local").get("sessions")[1]["sessions"] == []
    assert with_token.post("auth/token") == (200, said)  # not a new one, which would end later
    as_bearer = {"Authorization": f"Bearer {with_token.http.headers['X-API-Key']}"}
    assert httpx.get(f"{serving.url}/api/v1/sessions", headers=as_bearer).status_code == 200
    assert httpx.post(f"{serving.url}/api/v1/auth/token", headers=as_bearer).json() == said
