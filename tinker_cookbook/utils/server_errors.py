"""What a Tinker server said when it refused a request, out of the official SDK's errors."""

from __future__ import annotations

import re

_FRAME = re.compile(r"^Request failed: (.*) for self\.request_id=.*$", re.DOTALL)
"""What the SDK puts around the words of a request that failed later."""


def server_error_message(error: BaseException) -> str | None:
    """The server's words, or the whole error where it gave none; None for errors of other kinds.

    Goes by the attributes of the SDK's errors, as who asks may not have loaded it.
    """
    if type(error).__module__.partition(".")[0] != "tinker":
        return None
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        body = getattr(error, "body", None)
        said = body.get("detail") if isinstance(body, dict) else None
        return said if isinstance(said, str) else str(error)
    if str(getattr(error, "category", None)) == "user":
        return _FRAME.sub(r"\1", str(error))
    return None
