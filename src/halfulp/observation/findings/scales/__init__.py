"""Loss scales and gradient exponents: collapsed, held down, out of step with a schedule."""
