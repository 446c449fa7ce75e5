"""Speed and memory of the engine beside plain transformers + peft, in one run.

    python -m benchmarks.engine model=FOLDER data=conversations.jsonl dtype=float32
    python -m benchmarks.engine work=sampling
    python -m benchmarks.engine work=shared_prefix

Read it in this order: ``config`` (the settings), ``jobs`` and ``worker`` (each part runs in a
process of its own). Training: ``runner`` (what runs when), ``variants`` (the two training loops),
``conversations`` (the batches), ``ceilings`` and ``flops`` (what the machine could do and what the
work needs), ``report`` (ratios, table, JSON). ``sampling`` and ``shared_prefix`` are packages of
their own. ``shapes`` makes random models of true shapes; ``checks``, ``machine`` and ``summary``
serve all of them.
"""
