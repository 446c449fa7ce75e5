"""Lists, compares and removes runs: ``python -m tinker_cookbook.runs [COMMAND]``.

python -m tinker_cookbook.runs
python -m tinker_cookbook.runs compare LOG_PATH OTHER_LOG_PATH

A run has a log folder (metrics, settings, list of checkpoints), and its weights are in ``runs/RUN``
under ``TINKER_COOKBOOK_HOME``, or at the backend. ``inventory`` finds both.
"""
