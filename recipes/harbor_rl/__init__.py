"""Reinforcement learning on tasks in a terminal, in the folder format of Harbor."""
