"""Records in a store: starts its process, and sends it what the exporter has."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.capture import propagate
from tinker_cookbook.capture.exporter import CaptureExporter, CaptureRecord
from tinker_cookbook.capture.instrument import (
    current_exporter,
    instrument_tinker,
    uninstrument_tinker,
)
from tinker_cookbook.capture.scope import RESERVED_KEYS, ScopeValue, capture
from tinker_cookbook.utils.imports import missing_extra

JsonDict = dict[str, Any]
"""A JSON object."""

_RESPAWN_SECONDS = 0.5
_INFO = "daemon.json"
# Of a record of a sample: what has a column of its own, and is not kept in ``metadata`` too.
_OWN_COLUMN = {"kind", "scope", "samples", "sampling_session_id", "seq_id", "created_at"}
_OWN_COLUMN |= {"prompt_tokens"}


@dataclass
class CaptureSession:
    """An open recording: the address of its store, and its exporter."""

    base_url: str
    exporter: CaptureExporter


@contextlib.contextmanager
def capture_to_store(
    run_id: str,
    *,
    data_dir: str | Path,
    run_attempt: int = 0,
    idle_shutdown_minutes: float | None = 60.0,
    flush_interval_sec: float = 1.0,
    drain_timeout_sec: float = 5.0,
    instrument_threads: bool = True,
    **scope_pairs: ScopeValue,
) -> Iterator[CaptureSession]:
    """Records what the code of the block samples and trains, in ``data_dir/capture.sqlite``.

    A store that fails is no error for the block; see :class:`CaptureExporter` for the counts.
    Blocks may be nested; the inner one then records alone.

    Args:
        run_id: Name of the run in the store.
        data_dir: Folder of the store; several runs, also at once, may have the same one.
        run_attempt: Which start of the run this is.
        idle_shutdown_minutes: The store's process ends this long after its last request.
        flush_interval_sec: Longest time until a record is sent.
        drain_timeout_sec: How long the end of the block waits for calls that have no result yet,
            and for the store.
        instrument_threads: Whether threads and thread pools keep the scope.
        **scope_pairs: More pairs of :func:`tinker_cookbook.capture.scope.capture`.

    Raises:
        ConfigurationError: The extra ``capture`` is not installed.
        TimeoutError: The store does not start.
    """
    base_url = ensure_daemon(data_dir, idle_shutdown_minutes=idle_shutdown_minutes)
    exporter = CaptureExporter(StoreSink(base_url), flush_interval_sec=flush_interval_sec)
    outer = current_exporter()
    keep_threads = propagate.threads_instrumented() or not instrument_threads
    instrument_tinker(exporter)
    if instrument_threads:
        propagate.instrument_threads()
    try:
        with capture(run_id=run_id, run_attempt=run_attempt, **scope_pairs):
            yield CaptureSession(base_url, exporter)
    finally:
        # New calls first, so that the ones in flight become fewer.
        if outer is None:
            uninstrument_tinker()
        else:
            instrument_tinker(outer)
        if not keep_threads:
            propagate.uninstrument_threads()
        exporter.wait_pending(drain_timeout_sec)
        exporter.shutdown(drain_timeout_sec)


class StoreSink:
    """Sends records to a store.

    A sampled sequence becomes a row of ``wire_rows``, any other record one of ``annotations``.
    """

    def __init__(self, base_url: str, *, default_timeout: float = 10.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._default_timeout = default_timeout

    def export(self, records: Sequence[CaptureRecord], timeout: float | None = None) -> None:
        """Stores the records in their order.

        Raises:
            urllib.error.HTTPError: The store refused some; it has the others.
            OSError: The store cannot be reached, or took longer than ``timeout`` seconds in all.
        """
        deadline = time.monotonic() + (self._default_timeout if timeout is None else timeout)
        refused: list[urllib.error.HTTPError] = []
        for endpoint, payload in _ordered_ingest_batches(records):
            ((key, items),) = payload.items()
            refused += self._post(endpoint, key, items, deadline)
        if refused:
            raise refused[0]

    def _post(
        self, endpoint: str, key: str, items: list[JsonDict], deadline: float
    ) -> list[urllib.error.HTTPError]:
        """Returns the answers to rows that the store refused."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self._base_url}{endpoint}: the store takes too long")
        try:
            _post_json(f"{self._base_url}{endpoint}", {key: items}, left)
            return []
        except urllib.error.HTTPError as error:
            # A row is wrong, or all are too large together: the others are stored without it.
            if error.code not in (400, 413):
                raise
            if len(items) == 1:
                return [error]
        half = len(items) // 2
        parts = items[:half], items[half:]
        return [error for part in parts for error in self._post(endpoint, key, part, deadline)]


def wire_rows_from_sample_record(record: CaptureRecord) -> list[JsonDict]:
    """Returns a row for each sequence of a record; other pairs of the scope are in ``metadata``."""
    scope: JsonDict = record.get("scope", {})
    row: JsonDict = {key: scope.get(key) for key in RESERVED_KEYS}
    for key in ("sampling_session_id", "seq_id", "created_at", "prompt_tokens"):
        row[key] = record.get(key)
    row["policy_version"] = record.get("model_path") or record.get("policy_version")
    metadata = {key: value for key, value in record.items() if key not in _OWN_COLUMN}
    if more := {key: value for key, value in scope.items() if key not in RESERVED_KEYS}:
        metadata["scope"] = more
    return [
        row
        | {
            "sample_idx": i,
            "sampled_tokens": sample.get("tokens"),
            "logprobs": sample.get("logprobs"),
            "metadata": metadata | {"stop_reason": sample.get("stop_reason")},
        }
        for i, sample in enumerate(record.get("samples") or ())
    ]


def ensure_daemon(
    data_dir: str | Path,
    *,
    idle_shutdown_minutes: float | None = 60.0,
    spawn_timeout: float = 30.0,
) -> str:
    """Returns the address of the store in ``data_dir``, whose process is started if there is none.

    The process stays when this one ends.

    Raises:
        ConfigurationError: The extra ``capture`` is not installed.
        TimeoutError: The store does not answer within ``spawn_timeout`` seconds.
    """
    folder = Path(data_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    log, process = folder / "daemon.log", None
    deadline, started = time.monotonic() + spawn_timeout, 0.0
    while True:
        base_url = _healthy_base_url(folder)
        if base_url is not None and _claim_daemon(base_url):
            return base_url
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError(f"{folder}: no store answered within {spawn_timeout:g} s; see {log}")
        # Ours finds the folder locked if another process starts a store, or if an old one is just
        # ending; in the second case nothing would serve.
        if process is None or (process.poll() is not None and now - started >= _RESPAWN_SECONDS):
            process, started = _start_daemon(folder, idle_shutdown_minutes, log), now
        time.sleep(0.1)


def _start_daemon(folder: Path, idle_minutes: float | None, log: Path) -> subprocess.Popen[bytes]:
    try:
        importlib.import_module("aiohttp")
    except ImportError as error:
        raise missing_extra("recordings in a store", error, "capture") from error
    module = "tinker_cookbook.capture.store.daemon"
    command = [sys.executable, "-m", module, "--data-dir", str(folder), "--port", "0"]
    if idle_minutes is not None:
        command += ["--idle-shutdown-minutes", str(idle_minutes)]
    with log.open("ab") as output:
        # A session of its own: Ctrl-C in the terminal ends the run only.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _healthy_base_url(data_dir: Path, timeout: float = 1.0) -> str | None:
    """Returns the address of the store in ``data_dir`` if it answers there.

    The file may be of a process that has ended, whose port another store has now.
    """
    try:
        info = json.loads((data_dir / _INFO).read_bytes())
        health = _get_json(f"{info['base_url']}/healthz", timeout)
        known = (str(data_dir.resolve()), info["instance_token"])
        found = (health.get("data_dir"), health.get("instance_token"))
        return info["base_url"] if found == known else None
    except (OSError, ValueError, KeyError):
        return None


def _claim_daemon(base_url: str, timeout: float = 1.0) -> bool:
    """Restarts the time after which the store ends; ``False``: it is ending."""
    try:
        return _get_json(f"{base_url}/touch", timeout).get("status") == "ok"
    except (OSError, ValueError):
        return False


def _ordered_ingest_batches(records: Sequence[CaptureRecord]) -> list[tuple[str, JsonDict]]:
    """Returns address and body of requests, whose rows are in the order of the records."""
    rows: list[tuple[str, JsonDict]] = []
    for record in records:
        samples = wire_rows_from_sample_record(record) if record.get("kind") == "sample" else []
        rows += [("rows", row) for row in samples]
        if not samples:  # also a call that failed
            rows.append(("annotations", _annotation_from_record(record)))
    endpoints = {"rows": "/ingest/wire", "annotations": "/ingest/annotations"}
    grouped = itertools.groupby(rows, key=lambda found: found[0])
    return [(endpoints[key], {key: [row for _, row in group]}) for key, group in grouped]


def _annotation_from_record(record: CaptureRecord) -> JsonDict:
    # Kept in the record, so that a second export of it is known to the store.
    event_id = record["event_id"] = record.get("event_id") or str(uuid.uuid4())
    return {
        "event_id": event_id,
        "run_id": record.get("scope", {}).get("run_id"),
        "kind": record.get("kind", "unknown"),
        "payload": record,
        "created_at": record.get("created_at"),
    }


def _post_json(url: str, payload: JsonDict, timeout: float) -> JsonDict:
    ((key, items),) = payload.items()
    # Row by row: a single call for all of them would hold the interpreter's lock too long.
    body = f'{{"{key}": [{", ".join(json.dumps(item, default=str) for item in items)}]}}'
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body.encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with contextlib.suppress(Exception):  # the store's reason instead of "Bad Request"
            error.msg = json.load(error)["error"]
        raise


def _get_json(url: str, timeout: float) -> JsonDict:
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return json.load(response)
