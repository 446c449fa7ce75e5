"""Probes of addresses that no method of the newest SDK asks for: older SDKs do, or other tools."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import httpx

from tests.conformance.compatibility.probing import Probes, Refusal, expect
from tests.conformance.compatibility.world import TOKENS, World, run_of
from tests.conformance.compatibility.world import prompt as prompt_of

HTTP, UNKNOWN = Probes(), Probes()


def ask(world: World, method: str, path: str, **body: Any) -> Any:
    """The answer; a refusal is raised as one."""
    answer = world.http.request(method, path, json=body if method == "POST" else None)
    if 400 <= answer.status_code < 500 and answer.status_code not in (408, 409, 429):
        raise Refusal(answer.json()["detail"])
    expect(answer.status_code < 400, f"{answer.status_code}: {answer.text}")
    return answer.json() if answer.content and answer.status_code == 200 else answer


def result(world: World, request: dict[str, Any]) -> Any:
    """What comes of a request."""
    return ask(world, "POST", "retrieve_future", request_id=request["request_id"])


def run_by_json(world: World) -> str:
    """A new run, without the SDK."""
    session = ask(world, "POST", "create_session", sdk_version="json")["session_id"]
    made = ask(
        world,
        "POST",
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model=world.model,
        lora_config={"rank": 4, "seed": 0},
    )
    return result(world, made)["model_id"]


@HTTP("GET /healthz", "responds without a key")
def healthz(world: World) -> None:
    for address in (f"{world.url}/healthz", f"{world.url}/api/v1/healthz"):
        expect(httpx.get(address).json()["status"] == "ok", "it lives")


@HTTP("GET /metrics", "counters for Prometheus")
def metrics(world: World) -> None:
    said = world.http.get(f"{world.url}/metrics").text
    expect("tinker_cookbook_sessions" in said, "counters")


@HTTP("POST auth/token", "a token in place of the key")
def token(world: World) -> None:
    jwt = ask(world, "POST", "auth/token")["jwt"]
    answer = world.http.get("sessions", headers={"X-API-Key": jwt})
    expect(answer.status_code == 200, "it is accepted")


@HTTP("GET auth/apikey/me", "the owner's name")
def own_key(world: World) -> None:
    expect(ask(world, "GET", "auth/apikey/me")["name"] == "local", "the name")


@HTTP("DELETE auth/apikey/me", "the key is gone")
def delete_key(world: World) -> None:
    ask(world, "DELETE", "auth/apikey/me")


@HTTP("GET …/checkpoints/{kind}/{name}/archive", "the URL of a tar file with the PEFT files")
def archive(world: World) -> None:
    path = world.saved("sampler_weights")
    kind_and_name = path.split("/", 3)[3]
    asked = f"training_runs/{run_of(path)}/checkpoints/{kind_and_name}/archive"
    fetched = httpx.get(ask(world, "GET", asked).headers["Location"])
    with tarfile.open(fileobj=io.BytesIO(fetched.content)) as tar:
        expect("adapter_model.safetensors" in tar.getnames(), "PEFT's files")


@HTTP("POST telemetry", "accepted and discarded")
def telemetry(world: World) -> None:
    expect(ask(world, "POST", "telemetry", events=[])["status"] == "accepted", "it is")


@HTTP("POST cancel_future", "a queued request ends")
def cancel(world: World) -> None:
    model = run_by_json(world)
    waits = ask(world, "POST", "optim_step", model_id=model, seq_id=2, adam_params={})
    ask(world, "POST", "cancel_future", request_id=waits["request_id"])
    expect(result(world, waits)["error"] == "the request was cancelled", "it ended")


@HTTP("POST /inference/v1/generate", "tokens and log-probabilities, equal to those of scoring them")
def generate(world: World) -> None:
    params = {"max_tokens": 8, "stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": world.model, "token_ids": TOKENS, "sampling_params": params}
    (choice,) = ask(world, "POST", f"{world.url}/inference/v1/generate", **body)["choices"]
    content = choice["logprobs"]["content"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    expect([one["token"] for one in content] == names, "one log-probability for each token")
    client = world.service.create_sampling_client(base_model=world.model)
    whole = prompt_of([*TOKENS, *choice["token_ids"]])
    scores = client.compute_logprobs(whole).result()[len(TOKENS) :]
    apart = [abs(one["logprob"] - score) for one, score in zip(content, scores, strict=True)]
    expect(max(apart) < 1e-3, "those of scoring")


@HTTP("GET /v1/models", "the served models with `max_model_len`")
def models(world: World) -> None:
    (entry,) = ask(world, "GET", f"{world.url}/v1/models")["data"][:1]
    expect(entry["id"] == world.model and entry["max_model_len"] > 0, "the length of the context")


@HTTP(
    "POST /v1/chat/completions (return_token_ids)", "the token ids of prompt and message, streamed"
)
def chat_tokens(world: World) -> None:
    extra = {"return_token_ids": True, "logprobs": True, "renderer_name": "role_colon"}
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": world.model, "messages": messages, "max_tokens": 5, "temperature": 0}
    address = f"{world.url}/v1/chat/completions"
    whole = ask(world, "POST", address, **body, **extra)
    lines = world.http.post(address, json={**body, **extra, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    parts = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    expect(parts == whole["choices"][0]["token_ids"] != [], "the same tokens")
    expect(chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] != [], "the same prompt")


@UNKNOWN("GET no/such/thing, an unknown endpoint", "never")
def other(world: World) -> None:
    ask(world, "GET", "no/such/thing")
