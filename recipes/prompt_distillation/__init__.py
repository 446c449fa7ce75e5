"""Prompt distillation: a teacher answers with a long prompt, a student learns to without it."""
