"""What all training loops share: the common settings, and a session that owns a run's folder,
backend, log, checkpoints and evaluations. The loops themselves are in ``supervised``, ``rl`` …"""
