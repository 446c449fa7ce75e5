"""Runnable recipes: ``python -m recipes.NAME key=value ...``; ``--help`` lists the keys."""
