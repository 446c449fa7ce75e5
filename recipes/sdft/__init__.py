"""Self-distillation under the module path of the official cookbook."""
