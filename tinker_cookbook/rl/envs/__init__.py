"""Environments to subclass or to use: problems, conversations, preferences, reasoning tasks."""
