"""Another name of ``recipes.multiplayer_rl.twenty_questions``, as the public documents spell it."""
