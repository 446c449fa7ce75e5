"""What an RL run shows and writes: progress, metrics and transcripts."""
