"""Answers that become shorter: ``python -m recipes.preference.shorter.train``."""
