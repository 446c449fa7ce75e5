"""Inspect AI: its tasks on models of this package, and stored answers as its logs."""
