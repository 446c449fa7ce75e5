"""The doctor's report, as tables and as JSON."""

from __future__ import annotations

import math
import platform
import shutil
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tinker_cookbook
from tinker_cookbook.doctor.fits import ASSUMPTIONS, Fit, largest_fits
from tinker_cookbook.doctor.machine import Found, Machine, find_sandbox, find_vllm, look
from tinker_cookbook.doctor.packages import Extra, find_extras, version_of
from tinker_cookbook.doctor.parity import ParityCheck, check_parity
from tinker_cookbook.engine.home import home_dir
from tinker_cookbook.engine.model.loading import size_text
from tinker_cookbook.engine.sampler_settings import PYTHON_VARIABLE
from tinker_cookbook.run.paths import existing_parent, folder_size
from tinker_cookbook.sandbox.launch import INSTALL as INSTALL_SANDBOX

_LIBRARIES = ("tinker", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Report:
    """All results; ``install`` has one sentence for each recommended package."""

    machine: Machine
    fits: list[Fit]
    parity: list[ParityCheck]
    extras: list[Extra]
    sandbox: Found
    vllm: Found
    disk: dict[str, int]
    """Bytes that are free on the disk of ``TINKER_COOKBOOK_HOME``, and the size of that folder."""
    install: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the engine's results agree with transformers; nothing else is required."""
        return all(check.passed for check in self.parity)


def examine(device: str = "auto", dtype: str = "auto") -> Report:
    """Examines this machine; takes some seconds.

    Raises:
        ConfigurationError: This machine does not have the device or the dtype.
    """
    machine = look(device, dtype)
    kind, itemsize = machine.device_type, machine.choice.dtype.itemsize
    extras, sandbox, vllm, home = find_extras(), find_sandbox(), find_vllm(), home_dir()
    free = shutil.disk_usage(existing_parent(home)).free
    return Report(
        machine,
        largest_fits(machine.free_bytes, itemsize, kind),
        check_parity(str(machine.choice.device), machine.choice.dtype),
        extras,
        sandbox,
        vllm,
        {"free_bytes": free, "home_bytes": folder_size(home)},
        _worth_installing(machine, extras, sandbox, vllm),
    )


def as_json(report: Report) -> dict[str, Any]:
    """Returns the report as JSON values; sizes are in bytes."""
    machine, choice = report.machine, report.machine.choice
    return {
        "ok": report.ok,
        "versions": {**_versions(), "python": platform.python_version()},
        "device": str(choice.device),
        "device_name": machine.device_name,
        "device_reason": choice.device_reason,
        "dtype": str(choice.dtype).removeprefix("torch."),
        "dtype_reason": choice.dtype_reason,
        "cores": machine.cores,
        "threads": machine.threads,
        "ram_bytes": machine.ram_bytes,
        "free_bytes": machine.free_bytes,
        "gpu_bytes": machine.gpu_bytes,
        "kernels": [asdict(kernel) for kernel in machine.kernels],
        "fits": [asdict(fit) for fit in report.fits],
        "assumptions": list(ASSUMPTIONS),
        "parity": [
            # JSON has no NaN.
            {**asdict(one), "difference": None, "passed": False}
            if math.isnan(one.difference)
            else {**asdict(one), "passed": one.passed}
            for one in report.parity
        ],
        "extras": [{**asdict(e), "installed": e.installed} for e in report.extras],
        "sandbox": asdict(report.sandbox),
        "vllm": asdict(report.vllm),
        "disk": {"home": str(home_dir()), **report.disk},
        "install": report.install,
    }


def print_report(report: Report, console: Console) -> None:
    """Prints the report as tables."""
    machine, choice = report.machine, report.machine.choice
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    console.print(f"tinker_cookbook {tinker_cookbook.__version__} ({versions})", highlight=False)

    rows = [
        ("device", f"{choice.device}: {machine.device_name}; {choice.device_reason}"),
        ("precision", f"{str(choice.dtype)[6:]}; {choice.dtype_reason}"),
        ("cores", f"{machine.cores}, {machine.threads} used"),
        ("memory (RAM)", size_text(machine.ram_bytes)),
        ("memory of GPUs", ", ".join(map(size_text, machine.gpu_bytes)) or "no GPU"),
        (f"free on {choice.device}", size_text(machine.free_bytes)),
        ("free on disk", size_text(report.disk["free_bytes"])),
        (str(home_dir()), f"{size_text(report.disk['home_bytes'])}: weights, models, kernels"),
    ]
    if len(machine.gpu_bytes) > 1:
        command = f"torchrun --nproc-per-node {len(machine.gpu_bytes)} -m recipes.…"
        rows.append(("several GPUs", f"{command} trains on all of them"))
    rows += [
        (found.name, found.detail if found.there else f"not found: {found.detail}")
        for found in (*machine.kernels, report.sandbox, report.vllm)
    ]
    _print_table(console, "This machine", ("", ""), rows)

    fits = [
        (fit.work, fit.model or "none of the known ones", size_text(fit.needs_bytes))
        for fit in report.fits
    ]
    _print_table(console, "Largest known model that fits", ("", "model", "needs"), fits)
    console.print(
        "Estimated, not measured. Assumptions:", *(f"  {line}" for line in ASSUMPTIONS), sep="\n"
    )

    checks = [
        (
            check.name,
            check.error or f"{check.difference:.1e} (at most {check.tolerance:.0e})",
            "ok" if check.passed else "FAILED",
        )
        for check in report.parity
    ]
    title = f"A tiny model on {choice.device}, and the same on the CPU in transformers"
    _print_table(console, title, ("", "difference", ""), checks)

    installed = ", ".join(extra.name for extra in report.extras if extra.installed)
    console.print(f"\nExtras that are installed: {installed or 'none'}", highlight=False)
    missing = [(e.command, e.use) for e in report.extras if not e.installed]
    if missing:
        _print_table(console, "Extras that are not installed", ("", "for"), missing)
    console.print()
    if report.install:
        # Without markup: rich would take the name of an extra in brackets for a style.
        lines = "\n".join(f"  {text}" for text in report.install)
        console.print(f"Worth installing here:\n{lines}", markup=False, soft_wrap=True)
    if not report.ok:
        console.print(
            "The engine's results differ from transformers on this machine, so training "
            f"on {choice.device} would be wrong. Try device=cpu, and report the table above."
        )


def _worth_installing(
    machine: Machine, extras: list[Extra], sandbox: Found, vllm: Found
) -> list[str]:
    advice: list[str] = []
    missing = {extra.name: extra for extra in extras if not extra.installed}
    if shutil.which("nvidia-smi") is not None and not torch.cuda.is_available():
        advice.append("a CUDA build of torch: nvidia-smi is here, but torch sees no GPU")
    if machine.device_type == "cpu" and not all(k.there for k in machine.kernels[:2]):
        advice.append("gcc: the engine compiles its CPU kernels with it, and is slower without it")
    if machine.device_type == "cuda":
        if "gpu" in missing:
            advice.append(f"{missing['gpu'].command}: {missing['gpu'].use}")
        if not vllm.there:
            advice.append(
                f"vLLM in a separate environment, set with {PYTHON_VARIABLE}: faster sampling on "
                "GPUs (docs/gpu.md)"
            )
    if "server" in missing:
        advice.append(f"{missing['server'].command}: {missing['server'].use}")
    if not sandbox.there:
        advice.append(f"a sandbox for programs that a model wrote. {INSTALL_SANDBOX}")
    return advice


def _print_table(
    console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]
) -> None:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "needs")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table, markup=False, highlight=False)


def _versions() -> dict[str, str]:
    return {name: version_of(name) or "not installed" for name in _LIBRARIES}
