"""What training saves where datums begin alike: the engine with and without sharing prefixes.

``measure`` is one run in a process of its own, ``runner`` says what runs when and reports.
"""
