"""Twenty questions: ``python -m recipes.multiplayer_rl.twenty_questions.train``."""
