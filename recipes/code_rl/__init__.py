"""Reinforcement learning on programs that are graded in a sandbox."""
