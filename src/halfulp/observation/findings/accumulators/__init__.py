"""Long sums that a narrow format stops: moments, running averages, accumulated gradients."""
