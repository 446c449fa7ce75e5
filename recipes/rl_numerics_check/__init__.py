"""Checks the numerics of reinforcement learning on long episodes with many turns."""
