"""On-policy, off-policy and self-distillation."""
