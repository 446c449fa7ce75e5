"""Guess the number: ``python -m recipes.multiplayer_rl.guess_number.train``."""
