"""Reinforcement learning: environments, rollouts, advantages, and the loop that trains on them.

Read it in this order: ``types`` (what an environment is), ``problem_env`` and ``message_env``
(bases to subclass), ``rollouts`` (a policy plays an environment), ``data_processing``
(trajectories to training data), ``train`` (the loop).
"""
