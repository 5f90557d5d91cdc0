"""Rules of sums, norms, losses and order."""
