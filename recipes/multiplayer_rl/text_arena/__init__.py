"""Games of TextArena: ``python -m recipes.multiplayer_rl.text_arena.train``."""
