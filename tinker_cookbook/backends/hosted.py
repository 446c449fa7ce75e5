"""The hosted Tinker API, or any server that implements its protocol, through the official SDK.

The SDK connects on first use and then retries for minutes, long after a run has loaded its data.
``connect_hosted`` therefore first checks that a key is set and that the URL responds. These
checks send no secret.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.utils.imports import tinker

PROBE_SECONDS = 5.0
"""Seconds within which a URL must respond; otherwise it counts as unreachable."""

_EXIT_SECONDS = 5.0
"""Seconds that the program's end waits for a callback or request of the SDK's thread."""

_KEY_PREFIXES = ("tml-", "eyJ")  # an API key; a JSON web token
_LOCAL_INSTEAD = "or train on this machine with backend=local"


def hosted_credentials_present() -> bool:
    """Returns whether credentials (even malformed ones) are set where the SDK reads them:
    ``TINKER_API_KEY``, ``TINKER_CREDENTIAL_CMD``, and the file of ``tinker auth login``."""
    if os.environ.get("TINKER_API_KEY") or os.environ.get("TINKER_CREDENTIAL_CMD"):
        return True
    try:
        return _stored_login_is_usable()
    except BackendError:  # a damaged login counts, and connecting reports the error
        return True


def hosted_requested() -> bool:
    """Returns whether the environment has credentials or ``TINKER_BASE_URL``."""
    return bool(os.environ.get("TINKER_BASE_URL")) or hosted_credentials_present()


def connect_hosted(
    base_url: str | None = None,
    user_metadata: dict[str, str] | None = None,
    project_id: str | None = None,
) -> tinker.ServiceClient:
    """Returns the SDK's service client for ``base_url``.

    Args:
        base_url: ``None`` is ``TINKER_BASE_URL``, else the address of the hosted API.
        user_metadata: kept with the session on the server.
        project_id: project of new runs; ``None`` is ``TINKER_PROJECT_ID``, else the default one.

    Raises:
        BackendError: no key, a malformed one, a malformed address, or no response from it within
            ``PROBE_SECONDS``; the message names the next step.
    """
    from tinker.lib.base_url import resolve_base_url

    # Check cheap things first: the format of key and URL, then one request.
    check_credentials()
    if base_url or os.environ.get("TINKER_BASE_URL"):
        _check_url(base_url or os.environ["TINKER_BASE_URL"])
    url = resolve_base_url(base_url)
    reason = why_unreachable(url, PROBE_SECONDS)
    if reason is not None:
        raise BackendError(
            f"base_url: no answer from {url} ({reason}). Check the network and the address "
            f"(base_url=, TINKER_BASE_URL), {_LOCAL_INSTEAD}."
        )
    # The package calls these because all SDK versions have them; users cannot change that.
    for name in ("create_rest", "get_server_capabilities"):
        warnings.filterwarnings("ignore", rf"DEPRECATED: ServiceClient\.{name}", FutureWarning)
    # Exit handlers run in reverse order, so registering again makes this one run first.
    atexit.unregister(_end_sdk_thread)
    atexit.register(_end_sdk_thread)
    accept_samples_without_ids()
    accept_text_prompts()
    return tinker.ServiceClient(user_metadata, project_id, base_url=url)


def check_credentials() -> None:
    """Raises ``BackendError`` if the key is missing or malformed. Sends no request."""
    key = os.environ.get("TINKER_API_KEY")
    if os.environ.get("TINKER_CREDENTIAL_CMD"):
        return  # its output is unknown before it runs, and it overrides TINKER_API_KEY
    if key and (not key.startswith(_KEY_PREFIXES) or any(map(str.isspace, key))):
        raise BackendError(
            f"TINKER_API_KEY: got {len(key)} characters that do not begin with 'tml-' or that "
            "hold white space, expected an API key like 'tml-...'. Copy the key again from the "
            "Tinker console (for a server that checks no keys, 'tml-local' will do), "
            f"{_LOCAL_INSTEAD}."
        )
    if not key and not _stored_login_is_usable():
        raise BackendError(
            "TINKER_API_KEY: got none, and the hosted API needs a key. Get one in the Tinker "
            "console and `export TINKER_API_KEY=tml-...` or run `tinker auth login` (for a server "
            f"that checks no keys, 'tml-local' will do), {_LOCAL_INSTEAD}."
        )


def _stored_login_is_usable() -> bool:
    # Without a file there is no login; an unreadable file is an error with advice.
    path = Path("~/.tinker/credentials.json").expanduser()
    try:
        stored = json.loads(path.read_bytes())
        return stored.get("default") in stored.get("keys", {})
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BackendError(
            f"{path}: cannot be read as stored credentials ({error}). Run `tinker auth login` "
            f"again, or delete the file, {_LOCAL_INSTEAD}."
        ) from error


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port
        usable = False
    if not usable:
        raise BackendError(
            f"base_url: got {url!r}, expected an address like 'https://host' or "
            "'http://127.0.0.1:8000'"
        )


def accept_samples_without_ids() -> None:
    """Makes the SDK accept samples without ids, from servers with an older protocol.

    SDK 0.38 raises an assertion error for them. Only ``stable_reinforce`` needs the ids.
    ``connect`` calls this, and so does each process that unpickles an SDK client.
    """
    from tinker.lib.public_interfaces import sampling_client

    # There is no public setting for this; other SDK versions may lack the function.
    attach = getattr(sampling_client, "_attach_sequence_ids", None)
    if attach is None or getattr(attach, "accepts_none", False):
        return

    def attach_if_there(response: Any, sequence_ids: list[str] | None) -> Any:
        return response if sequence_ids is None else attach(response, sequence_ids)

    attach_if_there.accepts_none = True  # type: ignore[attr-defined]
    sampling_client._attach_sequence_ids = attach_if_there  # type: ignore[attr-defined]


def accept_text_prompts() -> None:
    """Gives the SDK's ``sample`` and ``sample_async`` the local client's defaults and text prompts.

    A string is tokenized with the special tokens that the model's tokenizer prepends.
    """
    from tinker.lib.public_interfaces.sampling_client import SamplingClient

    def adapted(sample: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(sample)
        def adapted_sample(
            self: Any,
            prompt: tinker.ModelInput | str,
            num_samples: int = 1,
            sampling_params: tinker.SamplingParams | None = None,
            *rest: Any,
            **more: Any,
        ) -> Any:
            if isinstance(prompt, str):
                prompt = tinker.ModelInput.from_ints(self.get_tokenizer().encode(prompt))
            params = sampling_params or tinker.SamplingParams()
            return sample(self, prompt, num_samples, params, *rest, **more)

        adapted_sample.accepts_text = True  # type: ignore[attr-defined]
        return adapted_sample

    for name in ("sample", "sample_async"):
        sample = getattr(SamplingClient, name)
        if not getattr(sample, "accepts_text", False):
            setattr(SamplingClient, name, adapted(sample))


_GATEWAY = (502, 503, 504)


def why_unreachable(url: str, seconds: float) -> str | None:
    """Requests the health of a server; any HTTP response will do, except that of a proxy that
    cannot reach its server. ``None``: it responded."""
    import httpx  # as the SDK, once a server is used

    reasons: list[str | None] = []

    def probe() -> None:
        # Do not verify certificates here: the SDK does, and only a response matters.
        health = f"{url.rstrip('/')}/api/v1/healthz"
        try:
            status = httpx.get(health, timeout=seconds, verify=False).status_code
            reasons.append(f"status {status} of a proxy" if status in _GATEWAY else None)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reasons.append(f"{type(error).__name__}: {error}")

    # In a thread, because a DNS lookup has no timeout.
    thread = threading.Thread(target=probe, daemon=True, name="probe-hosted")
    thread.start()
    thread.join(seconds + 0.5)
    return reasons[0] if reasons else f"nothing within {seconds:g} s"


def _end_sdk_thread() -> None:
    """Ends the SDK's daemon thread for requests before the interpreter exits.

    At exit, Python unwinds a daemon thread when it next needs the interpreter. Inside pydantic's
    compiled code, this aborts the process ("FATAL: exception not rethrown", status -6).
    """
    # The SDK has no public function for this; with other SDK versions the thread stays.
    holders = sys.modules.get("tinker.lib.internal_client_holder")
    running = getattr(holders, "_internal_client_holder_thread_singleton", None)
    loop, thread = getattr(running, "_loop", None), getattr(running, "_thread", None)
    if loop is not None and thread is not None and thread.is_alive():
        # call_soon_threadsafe is the only safe way to stop a loop from another thread. That thread
        # then returns from run_forever and ends, while the interpreter is still complete.
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_EXIT_SECONDS)
