"""Mathematics with answers that a program can check: ``python -m recipes.math_rl.train env=…``."""
