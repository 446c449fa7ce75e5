"""Reinforcement learning on generated pictures, graded exactly."""
