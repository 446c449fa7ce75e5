"""Utilities shared by all loops: command line, run folder, logging, transcripts, checkpoints."""
