"""The frozen base model, LoRA adapters, the output head, and lookup of models by name."""
