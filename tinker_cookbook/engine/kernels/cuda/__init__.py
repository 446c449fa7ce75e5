"""Kernels for CUDA: torch's variable-length and sparse attention, Liger's element-wise kernels."""
