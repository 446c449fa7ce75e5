"""Why a run does not improve or becomes worse; ``causes.py`` has the table of causes."""
