"""Programs that sample Inkling."""
