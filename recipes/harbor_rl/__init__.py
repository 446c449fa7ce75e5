"""Reinforcement learning on terminal tasks in Harbor's folder format."""
