"""A step of direct preference optimisation beside TRL's: see ``__main__``."""
