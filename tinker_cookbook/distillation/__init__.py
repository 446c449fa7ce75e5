"""Distillation: training a student towards a teacher.

``train_on_policy`` scores the student's own samples with a teacher, ``train_off_policy`` trains on
the teacher's distributions over fixed data, ``sdft`` has the model teach itself with the
demonstration in its prompt. Each has a ``Config`` and ``main``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.distillation import sdft, train_off_policy, train_on_policy

__all__ = [
    "sdft",
    "train_off_policy",
    "train_on_policy",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "sdft": "tinker_cookbook.distillation.sdft",
        "train_off_policy": "tinker_cookbook.distillation.train_off_policy",
        "train_on_policy": "tinker_cookbook.distillation.train_on_policy",
    },
)
