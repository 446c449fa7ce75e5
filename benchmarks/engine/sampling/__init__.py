"""Sampling speed and memory of the engine compared with transformers' ``generate``.

Read it in this order: ``requests``, ``sides`` (the engine and ``generate``),
``adapter`` (the weights that both load), ``products`` (what the machine could do), ``jobs`` (what
each process does), ``runner`` (what runs when), ``report`` (ratios, table, JSON).
"""
