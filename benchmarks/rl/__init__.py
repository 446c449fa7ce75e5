"""One step of reinforcement learning here beside one of TRL's GRPOTrainer, in one run.

    python -m benchmarks.rl steps=11 dtype=float32 trl_python=VENV/bin/python

Both train ``recipes.rl_basic``: the same model, problems in the same order, groups, reward
function and learning rate. Read it in this order: ``config`` (the settings), ``runner`` (each side
in a process of its own), ``ours`` and ``trl_side`` (those processes), ``report``.
"""
