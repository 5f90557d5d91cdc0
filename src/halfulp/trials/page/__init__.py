"""Templates and loss curves of the pages that comparisons write."""
