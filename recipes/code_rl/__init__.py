"""Reinforcement learning of writing programs, which are graded in a sandbox."""
