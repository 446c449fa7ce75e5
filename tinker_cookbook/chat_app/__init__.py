"""The chat under its name in the official cookbook."""
