"""Fetches the adapter of a checkpoint into a folder, from this disk or from a server."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias

import httpx
from torch import Tensor

from tinker_cookbook.backends.connect import check_backend, connect
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, TinkerPath
from tinker_cookbook.exceptions import TinkerCookbookError, WeightsDownloadError
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.run.weights_paths import resolve_weights

Adapter: TypeAlias = tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]

_TIMEOUT_SECONDS = 60.0
_EXPORT_TTL_SECONDS = 3600


def download(*, tinker_path: str, output_dir: str, base_url: str | None = None) -> str:
    """Writes the files of a checkpoint's adapter into ``output_dir``, and returns it.

    Args:
        tinker_path: ``tinker://RUN/KIND/NAME``, or ``LOG_PATH`` or ``LOG_PATH@STEP`` of a run.
        output_dir: Folder; created if it is missing. Files with the same names are replaced once
            all files are complete.
        base_url: URL of a Tinker server; default: as with ``backend=auto``, the store on this
            disk if the environment has neither a key nor a URL.

    Raises:
        WeightsDownloadError: There is no such checkpoint, the server cannot be reached or refuses,
            or an archive has unsafe entries.
    """
    out = local_path(output_dir, "output_dir").absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    # In the same file system, so that the files can be moved.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as part:
        try:
            path = resolve_weights(tinker_path, "sampler_weights", "tinker_path") or tinker_path
            _fetch(path, Path(part), "auto", base_url)
        except TinkerCookbookError as error:
            raise WeightsDownloadError(str(error)) from error
        out.mkdir(exist_ok=True)
        for path in Path(part).iterdir():
            path.replace(out / path.name)
    return output_dir


def read_remote(
    path: str, backend: str, base_url: str | None, read_adapter: Callable[[Path], Adapter]
) -> tuple[dict[str, Any], dict[str, Tensor], str, dict[str, str]]:
    """Returns config, tensors, base model and the run's metadata of a checkpoint on a server.

    ``read_adapter`` returns config, tensors and metadata of a folder.
    """
    with connect(backend, base_url=base_url) as connection:
        rest = connection.service.create_rest_client()
        stated = rest.get_weights_info_by_tinker_path(path).result().base_model
        try:
            run = rest.get_training_run_by_tinker_path(path).result()
            metadata = dict(run.user_metadata or {})
        except Exception:  # published weights of another owner's run
            metadata = {}
        with tempfile.TemporaryDirectory() as folder:
            _fetch_remote(connection.service, connection.target[1], path, Path(folder))
            config, tensors, header = read_adapter(Path(folder))
    return config, tensors, stated, {**header, **metadata}


def _fetch(path: str, folder: Path, backend: str, base_url: str | None) -> None:
    TinkerPath.parse(path)
    kind, _, _ = check_backend(backend, base_url)
    if kind == "local":
        for name, content in CheckpointStore().peft_files(path).items():
            (folder / name).write_bytes(content)
        return
    with connect(backend, base_url=base_url) as connection:
        _fetch_remote(connection.service, connection.target[1], path, folder)


def _fetch_remote(service: Any, base_url: str | None, path: str, folder: Path) -> None:
    """Downloads the files that a server has for a checkpoint: as an archive, or one by one."""
    rest = service.create_rest_client()
    try:
        if (archive_url := _archive_url(base_url, path)) is not None:
            with _opened(archive_url) as stream:
                return extract_archive(stream, folder)
        urls, temporary = _signed_urls(service, rest, path)
    except TinkerCookbookError:
        raise
    except Exception as error:  # the SDK has an exception for each status
        raise WeightsDownloadError(f"{path}: no download URL: {error}") from error
    try:
        for name, url in urls.items():
            with _opened(url) as stream, open(folder / _safe_name(name), "wb") as file:
                shutil.copyfileobj(stream, file)
    finally:
        if temporary is not None:
            rest.delete_checkpoint_from_tinker_path(temporary).result()


def _archive_url(base_url: str | None, path: str) -> str | None:
    """Returns the signed URL of an archive, or None if the server returns none.

    The SDK has no method for it, and refuses sampler_weights paths without a request.
    """
    from tinker.lib.base_url import resolve_base_url

    key = os.environ.get("TINKER_API_KEY")
    if not key:
        return None
    parsed = TinkerPath.parse(path)
    url = (
        f"{resolve_base_url(base_url).rstrip('/')}/api/v1/training_runs/{parsed.run_id}"
        f"/checkpoints/{parsed.kind}/{parsed.name}/archive"
    )
    try:
        # Redirects are not followed: the key must not be sent to the URL of a file.
        answer = httpx.get(url, headers={"X-API-Key": key}, timeout=_TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None  # the other method will report the server's error
    # Only a 404 that names the run; a server without this route returns another 404.
    if answer.status_code == 404 and parsed.run_id in answer.text:
        raise WeightsDownloadError(str(answer.json()["detail"]))
    return answer.headers.get("Location") if answer.is_redirect else None


def _signed_urls(service: Any, rest: Any, path: str) -> tuple[dict[str, str], str | None]:
    """Returns the URL of each file, and the path of a temporary export if one was needed."""
    try:
        return dict(rest.get_external_weights_urls(path).result().urls), None
    except Exception:
        # The hosted service has URLs only for external weights, which it creates from weights.
        if TinkerPath.parse(path).kind != "weights":
            # A training checkpoint of the same step has the same adapter.
            raise WeightsDownloadError(
                f"{path}: the server returns no download URL; give the state_path of the same step "
                "in checkpoints.jsonl, tinker://RUN/weights/NAME"
            ) from None
    client = service.create_training_client_from_state(path).result()
    saved = client.save_weights_external("download", ttl_seconds=_EXPORT_TTL_SECONDS).result().path
    return dict(rest.get_external_weights_urls(saved).result().urls), saved


def _opened(url: str) -> Any:
    try:
        return urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
    except (OSError, HTTPException, ValueError) as error:
        raise WeightsDownloadError(
            f"{url.partition('?')[0]}: cannot be downloaded: {error}; URLs expire, so try again"
        ) from error


def _safe_name(name: str) -> str:
    if name in ("", ".", "..") or PurePosixPath(name).name != name or "\\" in name:
        raise WeightsDownloadError(
            f"file name: got {name!r}, expected a name without folders; the checkpoint may be "
            "malicious, so nothing was written"
        )
    return name


def extract_archive(stream: IO[bytes], folder: Path) -> None:
    """Extracts a tar stream of plain files into ``folder``.

    Raises:
        WeightsDownloadError: An entry is a link, or has a path with folders; or the stream ends.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            for entry in archive:
                if entry.isdir():
                    continue
                content = archive.extractfile(entry) if entry.isfile() else None
                if content is None:
                    raise WeightsDownloadError(
                        f"{entry.name!r} in the archive is not a plain file; the archive may be "
                        "malicious, so nothing was written"
                    )
                name = _safe_name(entry.name.removeprefix("./"))
                with open(folder / name, "wb") as file:
                    shutil.copyfileobj(content, file)
    except tarfile.TarError as error:
        raise WeightsDownloadError(f"the archive is damaged: {error}") from error
