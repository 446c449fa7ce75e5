"""Distillation: trains a student to imitate a teacher.

``train_on_policy`` scores the student's own samples with a teacher, ``train_off_policy`` trains on
the teacher's distributions over fixed data, in ``sdft`` the model teaches itself with a
demonstration in its prompt. Each has a ``Config`` and ``main``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.distillation import sdft, train_off_policy, train_on_policy

__all__ = ["sdft", "train_off_policy", "train_on_policy"]

__getattr__ = lazy_exports(__name__, {name: f"{__name__}.{name}" for name in __all__})
