"""Sandboxes that run and grade programs written by a model.

``SandboxBackend.LOCAL`` needs neither Docker nor a cloud account; see docs/sandbox.md.
"""

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
    from tinker_cookbook.sandbox.local_sandbox import LocalSandbox, LocalSandboxPool
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


_GRADING = (
    "CallTest",
    "Grade",
    "GradedTest",
    "GraderSettings",
    "ProgramRun",
    "PythonGrader",
    "StdioTest",
    "default_grader",
    "grade_program",
    "same_output",
)
__getattr__ = lazy_exports(
    __name__,
    {
        "LocalSandbox": "tinker_cookbook.sandbox.local_sandbox",
        "LocalSandboxPool": "tinker_cookbook.sandbox.local_sandbox",
        "ModalSandbox": "tinker_cookbook.sandbox.modal_sandbox",
        "ModalSandboxPool": "tinker_cookbook.sandbox.modal_sandbox",
        "SandboxFusionClient": "tinker_cookbook.sandbox.sandboxfusion",
        "SandboxLimits": "tinker_cookbook.sandbox.launch",
        "SandboxTier": "tinker_cookbook.sandbox.launch",
        "available_tier": "tinker_cookbook.sandbox.launch",
        "names_in_tests": "tinker_cookbook.sandbox.program_text",
        "split_check": "tinker_cookbook.sandbox.program_text",
        **dict.fromkeys(_GRADING, "tinker_cookbook.sandbox.grading"),
    },
)

__all__ = [
    "CallTest",
    "Grade",
    "GradedTest",
    "GraderSettings",
    "LocalSandbox",
    "LocalSandboxPool",
    "ModalSandbox",
    "ModalSandboxPool",
    "ProgramRun",
    "PythonGrader",
    "SandboxBackend",
    "SandboxFusionClient",
    "SandboxInfrastructureError",
    "SandboxInterface",
    "SandboxLimits",
    "SandboxResource",
    "SandboxResult",
    "SandboxTerminatedError",
    "SandboxTier",
    "SandboxUnavailableError",
    "StdioTest",
    "available_tier",
    "default_grader",
    "grade_program",
    "names_in_tests",
    "same_output",
    "split_check",
]
