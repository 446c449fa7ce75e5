"""Saves the audit log of an organization on the hosted service, one JSONL file for each day (UTC).

    python -m tinker_cookbook.scripts.save_audit_log --once
    python -m tinker_cookbook.scripts.save_audit_log --backfill-days 7 --interval-seconds 3600

The key needs the role of an organization's admin. The current day is fetched at each poll; an
earlier one if its file is missing or was written before the day ended.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tinker_cookbook.backends.hosted import check_credentials
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.paths import ensure_writable_dir, write_atomically
from tinker_cookbook.utils.command_line.entrypoint import run_program

if TYPE_CHECKING:
    from tinker import AdminClient

logger = logging.getLogger(__name__)


def _file_of(output_dir: Path, day: date) -> Path:
    return output_dir / f"audit_log_{day.isoformat()}.jsonl"


def _is_complete(file: Path, day: date) -> bool:
    end = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    return file.exists() and file.stat().st_mtime >= end.timestamp()


def fetch_and_save_day(rest_client: AdminClient, output_dir: Path, day: date) -> int:
    """Writes the events of a day to its file, and returns their number."""
    entries = rest_client.get_audit_log(day=day).result().entries
    lines = [entry.model_dump_json() + "\n" for entry in entries]
    write_atomically(_file_of(output_dir, day), "".join(lines).encode())
    return len(lines)


def days_to_fetch(output_dir: Path, today: date, backfill_days: int) -> list[date]:
    """Returns today and, of the days before it, those whose file is missing or incomplete."""
    earlier = (today - timedelta(days=n) for n in range(1, backfill_days + 1))
    return [today, *(day for day in earlier if not _is_complete(_file_of(output_dir, day), day))]


def run_once(rest_client: AdminClient, output_dir: Path, backfill_days: int) -> None:
    """Fetches all days that are due."""
    for day in days_to_fetch(output_dir, datetime.now(UTC).date(), backfill_days):
        count = fetch_and_save_day(rest_client, output_dir, day)
        logger.info("%s: %d events", _file_of(output_dir, day), count)


def main(argv: Sequence[str] | None = None) -> None:
    """Fetches once, or at each interval; ``argv``: default ``sys.argv``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("audit_logs"))
    parser.add_argument(
        "--backfill-days", type=int, default=7, help="days before today; default: 7"
    )
    parser.add_argument(
        "--interval-seconds", type=int, default=3600, help="from poll to poll; default: 3600"
    )
    parser.add_argument("--once", action="store_true", help="fetch once and end")
    given = parser.parse_args(argv)
    for name, low in (("backfill_days", 0), ("interval_seconds", 1)):
        if getattr(given, name) < low:
            raise ConfigurationError(f"{name}: got {getattr(given, name)}, expected {low} or more")
    check_credentials()
    ensure_writable_dir(given.output_dir, "output_dir")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    import tinker

    client = tinker.AdminClient()
    # An error of the first poll, such as a missing role, ends the program; later ones pass.
    run_once(client, given.output_dir, given.backfill_days)
    while not given.once:
        time.sleep(given.interval_seconds)
        try:
            run_once(client, given.output_dir, given.backfill_days)
        except Exception:
            logger.exception("the audit log was not fetched; the next poll tries again")


if __name__ == "__main__":
    run_program(main)
