"""Conversions between the messages of this package and those of other libraries."""
