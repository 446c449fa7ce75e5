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
    runs = data.Runs(folder)
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

    def found(make: Callable[[], Any]) -> Response:
        try:
            return Response(as_json(make()), media_type="application/json")
        except (NotFoundError, FileNotFoundError):
            raise HTTPException(404, "This folder has no such run (any more).") from None
        except Exception as error:  # a damaged file, or one of another program
            raise HTTPException(422, reason(error)) from error

    # Plain functions run in threads, so that a large file does not hold up other requests.
    @app.get("/")
    def page() -> HTMLResponse:
        html, policy = page_html()
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    @app.get("/api/runs")
    def list_runs() -> Response:
        return found(runs.list)

    @app.get("/api/run")
    def run(name: str) -> Response:
        return found(lambda: runs.run(name))

    @app.get("/api/episodes")
    def list_episodes(name: str, step: int, split: str) -> Response:
        return found(lambda: episodes.episodes(runs.path_of(name), step, split))

    @app.get("/api/search")
    def search(name: str, step: int, split: str, text: str) -> Response:
        return found(lambda: episodes.search(runs.path_of(name), step, split, text))

    @app.get("/api/group")
    def group(name: str, step: int, split: str, group: int) -> Response:
        return found(lambda: episodes.group(runs.path_of(name), step, split, group))

    @app.get("/api/problem")
    def problem(name: str, problem: str) -> Response:
        return found(lambda: episodes.problem(runs.path_of(name), problem))

    @app.get("/api/sweep")
    def sweep(name: str) -> Response:
        return found(lambda: evaluations.sweep(runs.path_of(name)))

    @app.get("/api/answers")
    def answers(name: str, task: str) -> Response:
        return found(lambda: evaluations.answers(runs.path_of(f"{name}/{task}")))

    @app.get("/api/verdicts")
    def verdicts(a: str, b: str) -> Response:
        return found(lambda: evaluations.verdicts(runs.path_of(a), runs.path_of(b)))

    @app.get("/api/timing")
    def timing(name: str, step: int | None = None) -> Response:
        return found(lambda: files.timing(runs.path_of(name), step))

    @app.get("/api/tree")
    def tree(name: str, file: str | None = None) -> Response:
        return found(lambda: files.tree(runs.path_of(name), file))

    return app
