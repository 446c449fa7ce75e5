"""The OpenAPI document names every body, also of routes that read theirs themselves."""

from __future__ import annotations

import httpx


def test_every_reference_is_there_and_every_post_says_its_body(serving):
    document = httpx.get(f"{serving.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    refs = []

    def walk(value):
        if isinstance(value, dict):
            refs.append(value.get("$ref"))
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    walk(document)
    named = {ref.removeprefix("#/components/schemas/") for ref in refs if isinstance(ref, str)}
    assert named <= set(schemas)
    assert {"SampleBody", "Tensor", "ChatBody", "CompletionBody"} <= named
    for path in (
        "/api/v1/asample",
        "/oai/api/v1/completions",
        "/oai/api/v1/chat/completions",
    ):
        assert "requestBody" in document["paths"][path]["post"]
