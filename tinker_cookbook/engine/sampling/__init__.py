"""Continuous batching: scheduler, KV caches, prefill, token sampling and scoring."""
