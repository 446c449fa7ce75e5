"""Environments: problems, conversations, preferences, reasoning tasks."""
