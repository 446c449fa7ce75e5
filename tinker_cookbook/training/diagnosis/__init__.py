"""Why a run does not improve or becomes worse; ``table.py`` has the table of causes."""
