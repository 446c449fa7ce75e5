"""Sampling speed and memory of the engine compared with llama.cpp and transformers' ``generate``.

Read it in this order: ``requests``, ``sides`` (the engine and ``generate``), ``llama_cpp``,
``adapter`` (the weights that all load), ``jobs`` (what each process does), ``limits`` (what the
machine could do), ``runner`` (what runs when), ``report`` (ratios, table, JSON).
"""
