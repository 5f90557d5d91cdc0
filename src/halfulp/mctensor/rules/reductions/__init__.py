"""Rules of sums, norms, order and sums at indices."""
