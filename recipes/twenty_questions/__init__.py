"""Another name of ``recipes.multiplayer_rl.twenty_questions``, used in the official docs."""
