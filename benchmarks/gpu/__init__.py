"""Training speed on one GPU beside TRL with Liger's kernels, for models of true shapes.

    python -m benchmarks.gpu
    python -m benchmarks.gpu models=shape:qwen3-8b trl_gradient_checkpointing=true

Weights are random, rows have 8,192 tokens each. ``config`` has the settings, ``runner`` runs
``benchmarks.engine`` for each model, ``goals`` compares with the speeds that are aimed at.
"""
