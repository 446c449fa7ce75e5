"""Training and sampling with images: the engine and plain transformers with peft.

``measure`` is the process of one run, ``runner`` runs both variants in turn.
"""
