"""How much each step of a chain of thought changes the probability of the right answer."""
