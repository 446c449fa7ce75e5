"""Checkpoints of a run; the public door is ``tinker_cookbook.checkpoint_utils``."""
