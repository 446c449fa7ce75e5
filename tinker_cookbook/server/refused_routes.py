"""Addresses of the hosted service that have no meaning here, each with the reason and what to do.

They end with 400, which clients raise at once; any other unknown address ends with 404.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request

from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.server.access import TheOwner
from tinker_cookbook.server.errors import NotThere

router = APIRouter(prefix="/api/v1")

_CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"
_PRIVATE = (
    "this server shows no checkpoint to anyone but its owner. Fetch it with "
    "`tinker checkpoint download` and upload the folder where others can read it"
)
_NO_PROJECTS = "this server has no projects"
_NO_BILLS = "nothing is billed here"

REFUSED = {
    f"POST {_CHECKPOINT}/publish": f"publishing: {_PRIVATE}",
    f"DELETE {_CHECKPOINT}/publish": f"publishing: {_PRIVATE}",
    "POST copy_weights": (
        f"copying into a project: {_NO_PROJECTS}. A run of its own for the copy comes of "
        "create_training_client_from_state and save_state"
    ),
    "PUT sessions/{session_id}/project": f"assigning a project: {_NO_PROJECTS}; leave it out",
    "GET sessions/{session_id}/trace_export": (
        "exporting a trace: this server records none; /metrics counts what it does"
    ),
    "GET audit": "audit log: this server keeps none; what it does stands in its output",
    "GET billing/usage/events": f"billing: {_NO_BILLS}; /metrics counts the tokens",
    "GET billing/usage/checkpoints/current": (
        f"storage costs: {_NO_BILLS}; `tinker checkpoint list` shows the sizes"
    ),
    "DELETE auth/apikey/me": (
        "deleting a key: take it out of the server's file of keys and start the server anew"
    ),
    "POST create_custom_loss": (
        "uploading a loss: this server runs no code of clients. Leave custom_loss_server_side off: "
        "then forward_backward_custom computes the loss in the client"
    ),
    "POST retrieve_futures": "retrieve_futures: ask for each result with retrieve_future",
    "POST join_sampling_session": (
        "join_sampling_session: clones of a sampling client choose their own numbers here"
    ),
    "POST unload_model": "unload_model: models leave memory with their session; finish that",
}
"""Method and path, and the sentence."""


def _refusing(reason: str) -> Callable[..., Awaitable[None]]:
    async def refuse(owner: TheOwner) -> None:
        raise BackendError(reason)

    return refuse


for _address, _reason in REFUSED.items():
    _method, _path = _address.split()
    _endpoint = _refusing(_reason)
    router.add_api_route(f"/{_path}", _endpoint, methods=[_method], include_in_schema=False)


@router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
async def unknown(rest: str, request: Request, owner: TheOwner) -> None:
    """Any other address."""
    raise NotThere(
        f"{request.method} {request.url.path}: this server has no such address; /docs shows those "
        "it has"
    )
