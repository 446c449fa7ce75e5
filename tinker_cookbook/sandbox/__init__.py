"""Sandboxes that run and grade programs written by a model.

``SandboxBackend.LOCAL`` needs neither Docker nor a cloud account; see docs/sandbox.md.
"""

# ruff: noqa: F401
# pyright: reportUnsupportedDunderAll=false
from enum import StrEnum
from typing import TYPE_CHECKING

from tinker_cookbook.sandbox.sandbox_interface import (
    SandboxInfrastructureError,
    SandboxInterface,
    SandboxResource,
    SandboxResult,
    SandboxTerminatedError,
    SandboxUnavailableError,
)
from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.sandbox.grading import (
        CallTest,
        Grade,
        GradedTest,
        GraderSettings,
        ProgramRun,
        PythonGrader,
        StdioTest,
        default_grader,
        grade_program,
        same_output,
    )
    from tinker_cookbook.sandbox.launch import SandboxLimits, SandboxTier, available_tier
    from tinker_cookbook.sandbox.local_sandbox import LocalSandbox
    from tinker_cookbook.sandbox.modal_sandbox import ModalSandbox, ModalSandboxPool
    from tinker_cookbook.sandbox.program_text import names_in_tests, split_check
    from tinker_cookbook.sandbox.sandboxfusion import SandboxFusionClient


class SandboxBackend(StrEnum):
    """Where programs run."""

    LOCAL = "local"
    """On this machine, without a daemon. This is the default."""
    SANDBOXFUSION = "sandboxfusion"
    """A SandboxFusion server, which runs in Docker."""
    MODAL = "modal"
    """Modal's cloud."""


_LAZY = {
    **dict.fromkeys(
        (
            *("CallTest", "Grade", "GradedTest", "GraderSettings", "ProgramRun", "PythonGrader"),
            *("StdioTest", "default_grader", "grade_program", "same_output"),
        ),
        "grading",
    ),
    **dict.fromkeys(("SandboxLimits", "SandboxTier", "available_tier"), "launch"),
    **dict.fromkeys(("ModalSandbox", "ModalSandboxPool"), "modal_sandbox"),
    **dict.fromkeys(("names_in_tests", "split_check"), "program_text"),
    "LocalSandbox": "local_sandbox",
    "SandboxFusionClient": "sandboxfusion",
}
__getattr__ = lazy_exports(__name__, {name: f"{__name__}.{m}" for name, m in _LAZY.items()})
__all__ = [
    "SandboxBackend",
    "SandboxInfrastructureError",
    "SandboxInterface",
    "SandboxResource",
    "SandboxResult",
    "SandboxTerminatedError",
    "SandboxUnavailableError",
    *_LAZY,
]
