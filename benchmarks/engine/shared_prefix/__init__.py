"""Training on datums with a common beginning: the engine with and without sharing prefixes.

``measure`` is the process of one run, ``runner`` runs both variants in turn.
"""
