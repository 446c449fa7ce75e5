"""Self-distillation under the module path that the Tinker cookbook gives it."""
