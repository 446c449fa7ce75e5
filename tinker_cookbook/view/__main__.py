"""Shows the runs of a folder in a browser, or writes them into one HTML file.

    python -m tinker_cookbook.view /tmp/tinker-examples
    python -m tinker_cookbook.view LOG_PATH out=report.html

The page reads the files of the runs, also while they train. A report has all data in one file,
which needs no server and no network.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import default_log_path
from tinker_cookbook.exceptions import ConfigurationError, install_command
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.command_line.subcommands import with_keys
from tinker_cookbook.view.report import write_report

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@chz.chz
class ViewSettings:
    """Settings of the page."""

    folder: str = chz.field(default=default_log_path(""), doc="Folder of a run, or of several runs")
    out: str | None = chz.field(default=None, doc="Write this HTML file instead of serving")
    port: int = chz.field(default=7788, doc="Port; 0 chooses a free one")
    host: str = chz.field(
        default="127.0.0.1",
        doc="Address to bind; another one than loopback requires a key, which is printed",
    )


def main(settings: ViewSettings) -> None:
    """Writes the report, or serves the page until Ctrl-C."""
    folder = local_path(settings.folder, "folder")
    if not folder.is_dir():
        raise ConfigurationError(f"folder: got {settings.folder!r}, there is no such folder")
    if settings.out is not None:
        path = write_report(folder, Path(settings.out))
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; open it in a browser")
        return
    try:
        import uvicorn

        from tinker_cookbook.view.app import make_app
    except ImportError as error:
        raise ConfigurationError(f"the page needs a server: {install_command('server')}") from error
    key = None if settings.host in _LOOPBACK else secrets.token_urlsafe(16)
    config = uvicorn.Config(
        make_app(folder, key), host=settings.host, port=settings.port, log_level="warning"
    )
    try:
        socket = config.bind_socket()
    except (SystemExit, OverflowError, UnicodeError):  # uvicorn has said why
        raise ConfigurationError(
            f"host, port: got {settings.host}, {settings.port}, which cannot be used; expected an "
            "address of this machine and a free port up to 65535, such as port=0"
        ) from None
    suffix = f"/?key={key}" if key else "/"
    print(
        f"http://{settings.host}:{socket.getsockname()[1]}{suffix}   (Ctrl-C ends it)", flush=True
    )
    uvicorn.Server(config).run([socket])


if __name__ == "__main__":
    sys.argv[1:] = with_keys(sys.argv[1:], ("folder",))
    run_entrypoint(main)
