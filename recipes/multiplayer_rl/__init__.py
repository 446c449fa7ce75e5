"""Games of several turns, against a rule or against another model."""
