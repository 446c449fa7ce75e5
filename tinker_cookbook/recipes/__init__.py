"""The recipes under their second name: ``python -m tinker_cookbook.recipes.NAME``.

Their home is the top-level ``recipes`` package; this package only points there.
"""

import recipes

__path__ = list(recipes.__path__)
