"""The DPO recipe by its name in the package, ``tinker_cookbook.preference.train_dpo_cli``.

It takes the keys of ``python -m recipes.preference.dpo.train``.
"""

import runpy

if __name__ == "__main__":
    # By name, because the package does not import the recipes, which are a layer above it.
    runpy.run_module(
        "tinker_cookbook.recipes.preference.dpo.train", run_name="__main__", alter_sys=True
    )
