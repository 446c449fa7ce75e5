"""Common parts of all training loops: the settings, and a session that manages a run's folder,
backend, log, checkpoints and evaluations. The loops themselves are in ``supervised``, ``rl`` …"""
