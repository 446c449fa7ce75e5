"""Checkpoints of a run; the public module is ``tinker_cookbook.checkpoint_utils``."""
