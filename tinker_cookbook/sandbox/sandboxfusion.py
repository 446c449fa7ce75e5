"""Client of a SandboxFusion server, which runs programs in Docker.

    docker run -it -p 8080:8080 volcengine/sandbox-fusion:server-20250609

SANDBOX_URL is its address, SANDBOX_MAX_CONCURRENCY the number of concurrent requests.
"""

from __future__ import annotations

import asyncio
import base64
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

_DEFAULT_URL = "http://localhost:8080/run_code"
# Added to the program's time limit: the server needs time to start the program.
_EXTRA_SECONDS = 60.0


class SandboxFusionClient:
    """Sends programs to a SandboxFusion server.

    Args:
        url: Address of its ``run_code``; SANDBOX_URL, or port 8080 of this machine, if None.
        max_concurrency: Concurrent requests; None: SANDBOX_MAX_CONCURRENCY, or 4. Others wait.
    """

    def __init__(self, url: str | None = None, max_concurrency: int | None = None) -> None:
        self._url = url or os.environ.get("SANDBOX_URL", _DEFAULT_URL)
        most = max_concurrency or int(os.environ.get("SANDBOX_MAX_CONCURRENCY", "4"))
        self._slots = asyncio.Semaphore(most)
        self._http: httpx.AsyncClient | None = None

    async def run(
        self, code: str, files: dict[str, str], timeout: float, language: str = "python"
    ) -> tuple[bool, dict[str, Any]]:
        """Runs a program.

        Args:
            code: The program.
            files: Name -> text of the files in its folder.
            timeout: Seconds that the program may run, at least 1.
            language: One of the server's languages.

        Returns:
            Whether the program ran and ended with status 0, and the server's whole answer. Where
            the server failed, the answer has the key ``error``, which is not a result of the
            program.
        """
        import httpx

        request = {
            "code": code,
            "language": language,
            "run_timeout": max(1, int(timeout)),
            "files": {
                name: base64.b64encode(text.encode()).decode() for name, text in files.items()
            },
        }
        if self._http is None:
            self._http = httpx.AsyncClient()
        try:
            async with self._slots:
                answer = await self._http.post(
                    self._url, json=request, timeout=timeout + _EXTRA_SECONDS
                )
            if answer.status_code != 200:
                return False, {"error": f"HTTP {answer.status_code}: {answer.text}"}
            result = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            return False, {"error": f"{self._url}: {error!r}"}
        if result.get("status") == "SandboxError":
            return False, {"error": result.get("message") or "SandboxError", **result}
        return result.get("status") == "Success", result

    async def close(self) -> None:
        """Closes the connections; the next call opens new ones."""
        if self._http is not None:
            http, self._http = self._http, None
            await http.aclose()
