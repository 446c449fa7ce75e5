"""Environments of verifiers 0.4, its v1 interface: tasksets, harnesses, traces."""
