"""The chat under the name that it has in the official cookbook."""
