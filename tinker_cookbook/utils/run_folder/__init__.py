"""Files of a run's folder: lock, config, JSON lines, code state, replaced runs."""
