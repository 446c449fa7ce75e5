"""Device-specific kernels of the engine."""
