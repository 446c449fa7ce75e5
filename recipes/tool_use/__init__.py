"""Reinforcement learning with tools: questions about a shop's database."""
