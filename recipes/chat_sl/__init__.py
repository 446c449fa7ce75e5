"""Supervised fine-tuning on chat datasets."""
