"""Recipes for learning from preferences: pairs of answers of which one is better."""
