"""Tokens: who gets one, what it says, and what ends it."""

from __future__ import annotations

import base64
import json
import time

import httpx
import pytest

from tinker_cookbook.server.keys import TOKEN_SECONDS, KeyFile, issue_token


def _forged(token: str, **claims) -> str:
    head, body, signature = token.split(".")
    said = {**json.loads(base64.urlsafe_b64decode(body + "==")), **claims}
    again = base64.urlsafe_b64encode(json.dumps(said).encode()).rstrip(b"=").decode()
    return f"{head}.{again}.{signature}"


def test_a_token_holds_for_its_hours_under_its_key_alone(tmp_path):
    keys = KeyFile(tmp_path / "keys.json", tmp_path)
    key, now = keys.ensure(["ann"])["ann"], int(time.time())
    token = issue_token("ann", key, now)
    assert keys.owner_of(token) is keys.owner("ann")
    assert keys.owner_of(issue_token("ann", key, now + 60 - TOKEN_SECONDS)) is not None
    assert keys.owner_of(issue_token("ann", key, now - TOKEN_SECONDS)) is None
    assert keys.owner_of(issue_token("ann", key + "x", now)) is None
    for change in ({"sub": "tml:user:bob"}, {"exp": 10**12}):
        assert keys.owner_of(_forged(token, **change)) is None, change


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
    now = int(time.time())
    assert keys.owner_of(issue_token("local", made["ann"], now)) is None
    assert keys.owner_of(issue_token("nobody", made["ann"], now)) is None
    unsigned = issue_token("ann", made["ann"], now).rpartition(".")[0] + "."
    assert keys.owner_of(unsigned) is None
    (tmp_path / "keys.json").unlink()
    new = KeyFile(tmp_path / "keys.json", tmp_path)
    new.ensure(["ann"])
    assert new.owner_of(issue_token("ann", made["ann"], now)) is None  # the key was taken out


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
