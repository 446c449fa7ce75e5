"""Utilities shared by all loops: command line, run folder, logging, transcripts, checkpoints."""

from tinker_cookbook.utils.imports import alias_modules

# Module paths of the official cookbook for content that is in other modules here.
alias_modules(
    {
        "tinker_cookbook.utils.code_state": "tinker_cookbook.utils.run_folder.code_state",
        "tinker_cookbook.utils.file_utils": "tinker_cookbook.utils.misc_utils",
        "tinker_cookbook.utils.format_colorized": "tinker_cookbook.utils.terminal",
        "tinker_cookbook.utils.git_rev": "tinker_cookbook.utils.misc_utils",
        "tinker_cookbook.utils.logtree_formatters": "tinker_cookbook.utils.logtree.formatters",
        "tinker_cookbook.utils.lr_scheduling": "tinker_cookbook.training.lr_scheduling",
        "tinker_cookbook.utils.session_naming": "tinker_cookbook.utils.misc_utils",
    }
)
