"""One step of reinforcement learning compared with TRL's GRPOTrainer, in one run.

    python -m benchmarks.rl steps=11 dtype=float32 trl_python=VENV/bin/python

Both train ``recipes.rl_basic``: the same model, problems in the same order, groups, reward
function and learning rate. ``config`` has the settings, ``ours`` and ``trl_side`` are the
processes of both sides, and ``comparison`` reports.
"""
