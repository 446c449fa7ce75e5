"""Runnable recipes: ``python -m recipes.NAME key=value ...``; ``--help=all`` lists the keys.

``recipes.NAME`` and ``tinker_cookbook.recipes.NAME`` are the same modules. The second name is the
one that an installed package has; a link in the checkout gives it there too.
"""

if __name__ == "recipes":
    from tinker_cookbook.utils.imports import alias_package

    # Packaging alone (``package-dir`` of setuptools) gives the second name to an installed package,
    # but not to a clone, from which ``python -m recipes.NAME`` must start, and two names of one
    # folder without this finder would be two copies of each module.
    try:
        alias_package("recipes", "tinker_cookbook.recipes")
    except ModuleNotFoundError as error:
        raise ImportError(
            "tinker_cookbook/recipes: expected a link to ../recipes, which git creates unless "
            "links are switched off; next step: git config core.symlinks true, then git checkout ."
        ) from error
