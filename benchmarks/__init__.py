"""Measuring tools: ``python -m benchmarks.engine``, ``.rl``, ``.preference``, ``.server``."""
