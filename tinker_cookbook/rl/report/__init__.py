"""What an RL run shows and writes: progress, metrics, transcripts and diagnosis."""
