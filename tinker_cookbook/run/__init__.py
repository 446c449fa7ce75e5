"""The folder of a run: its configuration, metrics, checkpoints, lock, and how it is resumed."""
