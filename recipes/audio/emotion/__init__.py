"""Styles of speech."""
