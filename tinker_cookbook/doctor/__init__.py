"""Reports the capabilities of this machine: device, memory, models that fit, packages."""
