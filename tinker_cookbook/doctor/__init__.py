"""Says what this machine can do: device, memory, models that fit, packages, and what to install."""
