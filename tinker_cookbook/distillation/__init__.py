"""Distillation: trains a student to imitate a teacher.

``train_on_policy`` scores the student's own samples with a teacher, ``train_off_policy`` trains on
the teacher's distributions over fixed data, in ``sdft`` the model teaches itself with a
demonstration in its prompt. Each has a ``Config`` and ``main``.
"""
