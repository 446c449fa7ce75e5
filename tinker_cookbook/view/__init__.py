"""Page of the runs of a folder: curves, settings, episodes token by token."""
