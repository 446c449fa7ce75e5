"""The page and its data over HTTP; reads the files of runs and writes nothing."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from tinker_cookbook.view import data, episodes, evaluations, files
from tinker_cookbook.view.guard import NotFoundError, as_json, reason
from tinker_cookbook.view.page import page_html

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


def make_app(folder: Path, key: str | None = None) -> FastAPI:
    """Returns the application; with a ``key``, requests must bring it as ``?key=`` or cookie.

    Without one, the host that they ask for must be loopback: a page of another site could give its
    own name this address, and read the answers.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def check_key(
        request: Request, handle: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        given = request.query_params.get("key") or request.cookies.get("view_key") or ""
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            return Response("This page needs the key that the command printed.", 403)
        if key is None and not _LOOPBACK.fullmatch(request.headers.get("host", "")):
            return Response("Use http://localhost, or start with host=0.0.0.0 for a key.", 403)
        answer = await handle(request)
        if key is not None:
            answer.set_cookie("view_key", key, httponly=True, samesite="strict")
        return answer

    parts = _parts(data.Runs(folder))

    # Plain functions run in threads, so that a large file does not hold up other requests.
    @app.get("/")
    def page() -> HTMLResponse:
        html, policy = page_html()
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    @app.get("/api/{part}")
    def answer(part: str, request: Request) -> Response:
        if part not in parts:
            raise HTTPException(404, f"{part}: expected one of {', '.join(parts)}")
        given = {name: text for name, text in request.query_params.items() if name != "key"}
        try:
            return Response(as_json(parts[part](**given)), media_type="application/json")
        except (NotFoundError, FileNotFoundError):
            raise HTTPException(404, "This folder has no such run (any more).") from None
        except Exception as error:  # a damaged file, or one of another program
            raise HTTPException(422, reason(error)) from error

    return app


def _parts(runs: data.Runs) -> dict[str, Callable[..., Any]]:
    """Returns what the page asks for by name; its parameters are texts of the address."""
    path = runs.path_of

    def at(name: str, step: str, split: str) -> tuple[Path, int, str]:
        return path(name), int(step), split

    return {
        "runs": runs.list,
        "run": runs.run,
        "episodes": lambda **place: episodes.episodes(*at(**place)),
        "search": lambda text, **place: episodes.search(*at(**place), text),
        "group": lambda group, **place: episodes.group(*at(**place), int(group)),
        "problem": lambda name, problem: episodes.problem(path(name), problem),
        "sweep": lambda name: evaluations.sweep(path(name)),
        "answers": lambda name, task: evaluations.answers(path(f"{name}/{task}")),
        "verdicts": lambda a, b: evaluations.verdicts(path(a), path(b)),
        "timing": lambda name, step=None: files.timing(path(name), step and int(step)),
        "tree": lambda name, file=None: files.tree(path(name), file),
    }
