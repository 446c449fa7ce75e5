"""Distillation: training a student towards a teacher."""
