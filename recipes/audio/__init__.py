"""Speech: grading of transcripts, and preparation of data."""
