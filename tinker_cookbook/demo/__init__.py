"""A small chat model for first steps, from a PyPI package where the Hub cannot be reached."""
