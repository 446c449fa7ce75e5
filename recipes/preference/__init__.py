"""Recipes that learn from preferences: pairs of answers of which one is better."""
