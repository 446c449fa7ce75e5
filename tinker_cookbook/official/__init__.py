"""Names that exist because code written for the official tinker-cookbook imports them.

They are thin functions over the core, which imports nothing from here. Code finds them at their
official paths: a module of the core with ``__getattr__ = official_names(__name__)`` looks up names
in ``NAMES``, and a module without a file is looked up in ``MODULES`` (``utils.imports``).
"""

from __future__ import annotations

_PLACES = {
    "distillation.train_on_policy": {
        "distillation": """
            do_sync_training do_train_step_and_get_sampling_client incorporate_kl_penalty
            prepare_minibatch""",
    },
    "rl.metrics": {
        "rl_metrics": """
            compute_post_kl compute_sampling_client_metrics incorporate_kl_penalty
            score_sequences""",
    },
    "rl.train": {
        "rl_loops": """
            DISCARDED_WORK_LOG_INTERVAL_SECONDS DiscardedWorkLog count_discarded_rollout
            do_async_training do_sync_training do_sync_training_with_stream_minibatch
            drop_constant_reward_group""",
        "rl_steps": """
            SamplingClientReuse WrappedTrajectoryGroup _remove_mask
            compute_full_batch_metrics_and_get_sampling_client
            do_train_step_and_get_sampling_client do_train_step_streaming_and_get_sampling_client
            gather_with_progress prepare_minibatch print_group rollout_usage
            run_evaluations_parallel run_single_evaluation save_checkpoint_and_get_sampling_client
            train_step training_usage""",
    },
}

NAMES: dict[str, dict[str, str]] = {
    f"tinker_cookbook.{module}": {
        name: f"{__name__}.{place}" for place, names in places.items() for name in names.split()
    }
    for module, places in _PLACES.items()
}
"""Official module -> name -> module that defines it."""

MODULES: dict[str, str] = {}
"""Official module that has no file -> module with its content."""
