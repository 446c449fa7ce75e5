"""Speed and memory of the engine compared with plain transformers + peft, in one run.

    python -m benchmarks.engine model=FOLDER data=conversations.jsonl dtype=float32
    python -m benchmarks.engine work=sampling
    python -m benchmarks.engine work=shared_prefix

``config`` has the settings, ``jobs`` and ``worker`` run each part in its own process. Training:
``runner``, ``variants`` (the two training loops), ``conversations`` (the batches), ``ceilings`` and
``flops`` (the machine's best rates and the required operations), ``report``. ``sampling`` and
``shared_prefix`` are subpackages. ``shapes`` makes random models of published shapes.
"""
