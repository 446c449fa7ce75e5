"""Benchmarks: ``python -m benchmarks.engine``, ``.rl``, ``.preference``, ``.server``, ``.renderers``."""
