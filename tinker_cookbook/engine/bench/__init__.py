"""Training speed and memory of the engine beside plain transformers + peft, in one run.

    python -m tinker_cookbook.engine.bench model=FOLDER data=conversations.jsonl dtype=float32

Read it in this order: ``config`` (the settings), ``runner`` (what runs when, each part in a process
of its own), ``worker`` (that process), ``variants`` (the two training loops), ``conversations``
(the batches), ``shapes`` (random models of true shapes), ``ceilings`` and ``flops`` (what the
machine could do and what the work needs), ``report`` (ratios, table, JSON).
"""
