"""Programs under the names of the original Tinker Cookbook."""
