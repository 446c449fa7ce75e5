"""The frozen base model, its LoRA adapters, and finding a model by its name."""
