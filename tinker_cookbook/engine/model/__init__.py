"""The frozen base model, LoRA adapters, the output head, and resolving model names."""
