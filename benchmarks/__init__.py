"""Benchmarks: ``python -m benchmarks.NAME`` (engine, rl, preference, server, renderers)."""
