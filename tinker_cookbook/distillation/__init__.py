"""Distillation: training a student towards a teacher.

``train_on_policy`` scores the student's own samples with a teacher, ``train_off_policy`` trains on
the teacher's distributions over fixed data, ``sdft`` has the model teach itself with the
demonstration in its prompt. Each has a ``Config`` and ``main``.
"""
