"""The cases of each family: see ``family_case.py``."""
