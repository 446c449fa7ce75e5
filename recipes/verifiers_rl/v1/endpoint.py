"""Token endpoint in this process: requests of verifiers become calls of the policy.

It has the two routes that the library's train client uses, as in our server. A header identifies
each rollout, so concurrent rollouts get the policy and the random numbers of their own episode.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import tinker
from aiohttp import web

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.recipes.verifiers_rl.driven_env import ModelCall

MODEL = "policy"
SESSION_HEADER = "X-Session-ID"


@dataclass(frozen=True)
class Session:
    """Rollout of one agent: how it samples, where its responses end, and if they are trained."""

    call: ModelCall
    stop: StopCondition
    agent: Any
    """The library's agent; its turns are trained if it is ``trainable`` at that time."""


class TokenEndpoint:
    """HTTP server on a free local port; ``sessions`` are the open rollouts by their ids."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Begins to serve."""
        # Prompts of long episodes are larger than the default of 1 MiB.
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        self._runner = runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def stop(self) -> None:
        """Ends the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        # Without max_model_len: the limits of the run decide about long prompts.
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _generate(self, request: web.Request) -> web.Response:
        session = self.sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            message = f"{SESSION_HEADER}: no open rollout has this id"
            return web.json_response({"error": {"message": message}}, status=400)
        body = await request.json()
        prompt = tinker.ModelInput.from_ints(body["token_ids"])
        response = await session.call(prompt, session.stop, trained=bool(session.agent.trainable))
        content = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(response.tokens, response.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": response.tokens,
            "finish_reason": "length" if response.stop_reason == "length" else "stop",
            "logprobs": {"content": content},
        }
        return web.json_response({"request_id": secrets.token_hex(8), "choices": [choice]})
