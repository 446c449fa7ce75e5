"""The record of a run: what was sampled, scored and trained at each step, as Parquet files.

``docs/record.md`` describes the columns. :func:`tinker_cookbook.record.read.open_record` reads it.
"""
