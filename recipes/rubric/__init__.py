"""Reinforcement learning on rubrics: a judge model grades answers by criteria."""
