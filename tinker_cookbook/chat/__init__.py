"""Chat with checkpoints and base models in the terminal: ``python -m tinker_cookbook.chat``."""
