"""Training runs: packing, micro-batches, losses and the optimizer."""
