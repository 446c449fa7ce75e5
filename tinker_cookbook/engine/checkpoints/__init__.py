"""Checkpoints on disk: atomic writes, checksums, runs and expiry."""
