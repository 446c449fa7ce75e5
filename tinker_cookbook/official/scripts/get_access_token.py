"""Prints a short-lived access token as a line for the shell, ``export TINKER_API_KEY=…``.

    export TINKER_CREDENTIAL_CMD="command that prints a key or credential"
    eval "$(python -m tinker_cookbook.scripts.get_access_token)"

It is for organizations whose SDK runs ``TINKER_CREDENTIAL_CMD``, and for ``copy_checkpoint``,
which takes the token of another account. ``TINKER_BASE_URL`` names another server.
"""

from __future__ import annotations

import os
import shlex
import subprocess

import httpx

from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.utils.command_line.entrypoint import run_program

BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
_SECONDS = 60


def main() -> None:
    """Runs the command, exchanges its credential for a token, and prints that."""
    url = (os.environ.get("TINKER_BASE_URL") or BASE_URL).rstrip("/")
    # Quoted, because a shell evaluates the line.
    print(f"export TINKER_API_KEY={shlex.quote(_token(url, _credential()))}")


def _credential() -> str:
    command = os.environ.get("TINKER_CREDENTIAL_CMD")
    if not command:
        raise ConfigurationError(
            "TINKER_CREDENTIAL_CMD: got none, expected a command that prints a key or credential"
        )
    # By the shell, as the SDK runs it. Its errors go to the terminal.
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True)
    credential = done.stdout.strip()
    if done.returncode or len(credential.split()) != 1:
        raise ConfigurationError(
            f"TINKER_CREDENTIAL_CMD: {command!r} ended with status {done.returncode} and printed "
            f"{len(credential.split())} words, expected status 0 and one word, the credential"
        )
    return credential


def _token(url: str, credential: str) -> str:
    headers = {"X-API-Key": credential}
    try:
        answer = httpx.post(f"{url}/api/v1/auth/token", json={}, headers=headers, timeout=_SECONDS)
        token = str(answer.json()["jwt"]) if answer.is_success else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise BackendError(
            f"{url}: no token from it ({type(error).__name__}: {error}); check TINKER_BASE_URL and "
            "the network"
        ) from error
    if token is None:
        raise BackendError(
            f"{url} refused the credential: status {answer.status_code}, {answer.text[:300]}"
        )
    return token


if __name__ == "__main__":
    run_program(main)
