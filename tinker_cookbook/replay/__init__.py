"""Computes recorded steps of a run again, and compares every number; see ``docs/replay.md``."""
