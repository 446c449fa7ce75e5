"""Judges: models that grade answers, and measures of their agreement with known labels."""
