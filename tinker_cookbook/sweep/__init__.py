"""Runs a recipe over a grid of settings on one server:
``python -m tinker_cookbook.sweep RECIPE key=a,b,c log_dir=FOLDER``."""
