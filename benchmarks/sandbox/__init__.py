"""Sandboxes: programs graded a second, and attacks on graders."""
