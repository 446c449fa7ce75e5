"""Reinforcement learning of tool calls: ``python -m recipes.tool_use.train``."""
