"""Makers of the small models that some recipes train, so that learning takes minutes on a CPU."""
