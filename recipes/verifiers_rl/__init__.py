"""Reinforcement learning on environments of both generations of the verifiers library."""
