"""Command line of recipes and programs: ``key=value`` arguments, ``--help``, errors."""
