"""Scripts behind single pages of ``docs/benchmarks``; each names its command in its first line."""
