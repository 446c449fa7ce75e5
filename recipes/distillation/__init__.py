"""Distillation: on-policy, off-policy and from oneself."""
