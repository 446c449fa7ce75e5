"""Sampling speed and memory of the engine beside transformers' ``generate``, in one run.

Read it in this order: ``requests`` (what is asked for), ``sides`` (the engine and ``generate``),
``adapter`` (the weights that both load), ``products`` (what the machine could do), ``jobs`` (what
a process of its own does), ``runner`` (what runs when), ``report`` (ratios, table, JSON).
"""
