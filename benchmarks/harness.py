"""The harness of all benchmarks: each part runs in a separate process, and variants take turns.

A separate process gives each variant its own peak memory, and if the system kills it for its
memory, the benchmark continues.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError, nearest

if TYPE_CHECKING:
    import torch

    from tinker_cookbook.engine.devices import DeviceChoice

Outcome = dict[str, Any]
"""Result of a process: ``status`` ("ok", "failed", "killed" or "out of memory"), ``error`` if it is
not ok, and the figures if it is."""

_LIBRARIES = ("torch", "transformers", "peft", "numpy")
_STDERR_LINES = 15


# --- the process that runs the benchmark -------------------------------------------------------


def interleave(
    runs: Mapping[str, list[Outcome]],
    repeats: int,
    run: Callable[[str], Outcome],
    describe: Callable[[Outcome], str],
    label: str,
    console: Console,
) -> None:
    """Appends the outcomes of ``repeats`` runs of each variant to ``runs``, in turn (A B A B).

    Neighbouring runs see the same machine, so their ratio is fair. A variant that failed is not run
    again.
    """
    for repeat in range(1, repeats + 1):
        for variant, outcomes in runs.items():
            if outcomes and outcomes[-1]["status"] != "ok":
                continue
            outcomes.append(run(variant))
            line = f"{label} {repeat}/{repeats} {variant}: {describe(outcomes[-1])}"
            console.print(line, markup=False, soft_wrap=True)


def run_module(
    module: str,
    job: dict[str, Any],
    work: Path,
    environment: Mapping[str, str] | None = None,
    python: str | None = None,
    checkout: str | None = None,
) -> Outcome:
    """Runs ``python -m module JOB_FILE RESULT_FILE`` and returns the result.

    ``others`` and ``steal`` in it are the shares of all processors that other processes and a
    hypervisor took meanwhile (absent where the system does not tell).

    Args:
        module: Calls :func:`run_worker`.
        job: Written to the job file.
        work: Folder of the files.
        environment: Variables in addition to the inherited ones.
        python: The interpreter; by default this one.
        checkout: Folder of another commit, whose package runs under these benchmarks.
    """
    job_file, result_file, log_file = work / "job.json", work / "result.json", work / "log"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    result_file.unlink(missing_ok=True)
    command = [python or sys.executable, "-m", module, str(job_file), str(result_file)]
    variables = {**os.environ, **(environment or {})}
    folder = None if checkout is None else _joined(checkout, work / "checkout")
    if folder is not None:
        variables["PYTHONPATH"] = str(folder)
    start = _processor_seconds()
    with log_file.open("wb") as log:
        done = subprocess.run(
            command, stdout=log, stderr=log, env=variables, cwd=folder, check=False
        )
    taken = [after - before for after, before in zip(_processor_seconds(), start, strict=True)]
    if result_file.is_file():
        outcome = json.loads(result_file.read_text(encoding="utf-8"))
    elif done.returncode == -signal.SIGKILL:
        outcome = {"status": "killed", "error": "killed by the system, most likely out of memory"}
    elif done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        outcome = {"status": "killed", "error": f"ended by signal {name}"}
    else:
        outcome = {"status": "failed", "error": f"exit status {done.returncode}"}
    if outcome["status"] == "failed":
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-_STDERR_LINES:]), file=sys.stderr)
    if taken:
        whole, used, steal, own = taken
        outcome |= {"others": max(0.0, used - own) / whole, "steal": steal / whole}
    return outcome


def _joined(checkout: str, folder: Path) -> Path:
    """Returns ``folder`` with the package of ``checkout`` and these benchmarks."""
    if not folder.is_dir():
        folder.mkdir()
        package = Path(checkout).expanduser().resolve() / "tinker_cookbook"
        for source in (package, Path(__file__).resolve().parent):
            (folder / source.name).symlink_to(source)
    return folder


def _processor_seconds() -> list[float]:
    """Seconds of all processors: whole, used, taken by a hypervisor; used by us and children."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)[1:9]
    except OSError:
        return []
    ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
    idle, steal = ticks[3] + ticks[4], ticks[7]
    # The sum of the fields can lag behind the clock, so the clock counts.
    whole = time.monotonic() * (os.cpu_count() or 1)
    return [whole, sum(ticks) - idle - steal, steal, sum(os.times()[:4])]


def dtype_name(choice: DeviceChoice) -> str:
    """Returns torch's name of the dtype, without its prefix."""
    return str(choice.dtype).removeprefix("torch.")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns code, libraries and processor; ``commit`` is None outside a checkout."""
    import torch

    from tinker_cookbook.engine.devices import cpu_threads

    here = Path(__file__).resolve()
    commit, status = None, None
    # Installed into another checkout (a virtual environment there) is not part of it.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is not None:
        commit = _git(here.parent, "rev-parse", "HEAD")
        status = _git(
            here.parents[1], "status", "--porcelain", "--", "tinker_cookbook", "benchmarks"
        )
    try:
        cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        cpu_info = []
    names = [line.partition(":")[2].strip() for line in cpu_info if line.startswith("model name")]
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = None
    return {
        "device": str(device),
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": cpu_threads(),
        "commit": commit,
        "uncommitted_changes": None if status is None else bool(status),
        "versions": versions,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# --- the process of one part -------------------------------------------------------------------


def run_worker(
    run: Callable[[dict[str, Any]], dict[str, Any]], job_file: str, result_file: str
) -> int:
    """Runs the job of ``job_file`` and writes its figures; returns the exit status.

    ``peak_bytes``, the peak memory of this process, is added if the job has a device and did not
    report it.
    """
    _prefer_oom_kill()
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    try:
        result = {"status": "ok", **run(job)}
        if "device" in job and "peak_bytes" not in result:
            from tinker_cookbook.engine.devices import choose_device, peak_memory_bytes

            device = choose_device(job["device"], job["dtype"]).device
            result["peak_bytes"] = peak_memory_bytes(device)
    except Exception as error:  # the figures of the other variants are kept in any case
        status = "out of memory" if _is_out_of_memory(error) else "failed"
        first_line = (str(error).splitlines() or [""])[0]
        result = {"status": status, "error": f"{type(error).__name__}: {first_line}"}
        if not isinstance(error, TinkerCookbookError) and status == "failed":
            traceback.print_exc()
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")
    return int(result["status"] != "ok")


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    from tinker_cookbook.exceptions import OutOfMemoryError

    if isinstance(error, (torch.OutOfMemoryError, OutOfMemoryError, MemoryError)):
        return True
    return "can't allocate memory" in str(error)  # torch's CPU allocator raises RuntimeError


def _prefer_oom_kill() -> None:
    """If memory runs out, the kernel should kill this process, not the one that reports it."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError:
        return  # not Linux, or not permitted: the kernel then kills the largest process


# --- settings ----------------------------------------------------------------------------------


def check_least(config: Any, bounds: Mapping[str, int]) -> None:
    """Raises ``ConfigurationError`` for the first setting below its bound."""
    for name, least in bounds.items():
        if getattr(config, name) < least:
            raise ConfigurationError(
                f"{name}: got {getattr(config, name)}, expected a whole number >= {least}"
            )


def check_choices(field: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """Raises ``ConfigurationError`` unless ``chosen`` are some of ``known``, each once."""
    expected = f"expected some of {', '.join(known)}"
    if not chosen:
        raise ConfigurationError(f"{field}: got none, {expected}")
    for name in chosen:
        if name not in known:
            raise ConfigurationError(f"{field}: got {name!r}, {expected}{nearest(name, known)}")
    if len(set(chosen)) < len(chosen):
        raise ConfigurationError(
            f"{field}: got {','.join(chosen)}, expected each at most once; set repeats to run "
            "them several times"
        )


def check_output(output: str | None) -> None:
    """Raises ``ConfigurationError`` if the folder of the output file does not exist."""
    if output is not None and not Path(output).expanduser().parent.is_dir():
        raise ConfigurationError(
            f"output: the folder of {output} does not exist; create it or write elsewhere"
        )
