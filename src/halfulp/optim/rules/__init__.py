"""Update rules: the arithmetic of each optimizer."""
