"""Games with several turns, against a program or against another model."""
