"""What this server does not do is said at once, with a status that clients do not repeat."""

from __future__ import annotations

import pytest

from tinker_cookbook.server.app import error_response


@pytest.mark.parametrize("address", ["POST copy_weights", "GET audit", "POST unload_model"])
def test_addresses_of_the_hosted_service_are_not_here(caller, address):
    method, path = address.split()
    answer = caller().http.request(method, path, json={})
    assert answer.status_code == 404
    assert "no projects, traces, audit log and billing" in answer.json()["detail"]
    assert caller(None).http.request(method, path, json={}).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api/v1/asample", "POST"),
        ("PUT", "/api/v1/training_runs", "GET"),
        ("POST", "/api/v1/training_runs/r/checkpoints/weights/n", "DELETE"),
        ("GET", "/oai/api/v1/completions", "POST"),
        ("DELETE", "/oai/api/v1/models", "GET"),
    ],
)
def test_a_wrong_method_of_a_known_address_gets_405(caller, method, path, allowed):
    http = caller().http
    response = http.request(method, http.base_url.join(path))
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    message = f"{method} {path}: this path exists for {allowed} only"
    if path.startswith("/oai"):
        assert response.json()["error"]["message"] == message
        assert response.json()["error"]["type"] == "invalid_request_error"
    else:
        assert response.json() == {"detail": message}


@pytest.mark.parametrize("path", ["/api/v1/create_model", "/oai/api/v1/completions"])
def test_an_error_of_the_server_itself_is_not_described(path):
    response = error_response(RuntimeError("/home/ann/file"), path)
    assert response.status_code == 500
    assert b"its log has the reason" in response.body
    assert b"/home/ann" not in response.body
