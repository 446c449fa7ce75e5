"""Routes of operations whose refused bodies leave no gap in the order of a model's operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from tinker_cookbook.server.access import host_of, owner_of
from tinker_cookbook.server.bodies import PassHead
from tinker_cookbook.server.errors import NotThere
from tinker_cookbook.server.read_body import JsonRoute


class TurnRoute(JsonRoute):
    """A body without the right form is answered with 422 at once, and its number given up.

    The operations after it would wait for that number otherwise.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, which also gives up the turn of what it refuses."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                # Of a stranger, or of a model that is not there, there is no turn to give up.
                with contextlib.suppress(ValidationError, NotThere, HTTPException):
                    await _give_up_turn(request, error.body)
                raise

        return handle


async def _give_up_turn(request: Request, body: Any) -> None:
    head, host = PassHead.model_validate(body), await host_of(request)
    if head.seq_id is not None:
        _, model = host.model(await owner_of(request), head.model_id)
        model.turns.give_up(head.seq_id)
