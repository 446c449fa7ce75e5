"""Supervised fine-tuning: conversations to datums, the training loop, held-out losses."""
