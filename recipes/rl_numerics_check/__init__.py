"""A check of the numerics of reinforcement learning on long episodes of many turns."""
