"""RL towards shorter answers: ``python -m recipes.preference.shorter.train``."""
