"""How tensors are looked at: exact extremes of the whole, and counts of a sample at places that a counter chooses."""
