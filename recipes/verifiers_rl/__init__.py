"""Reinforcement learning on environments of the verifiers library, both generations of it."""
