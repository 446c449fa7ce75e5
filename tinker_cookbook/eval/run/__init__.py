"""Runs of benchmarks: problems, sources of answers, grading, and the stored answers."""
