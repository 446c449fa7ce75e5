"""Data parallel training by several processes of one machine, started by torchrun."""
