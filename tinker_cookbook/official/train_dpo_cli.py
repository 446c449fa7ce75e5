"""Runs the DPO recipe as ``tinker_cookbook.preference.train_dpo_cli``.

It has the options of ``python -m recipes.preference.dpo.train``.
"""

import runpy

if __name__ == "__main__":
    # By name, because the package must not import the recipes.
    runpy.run_module(
        "tinker_cookbook.recipes.preference.dpo.train", run_name="__main__", alter_sys=True
    )
