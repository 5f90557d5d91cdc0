"""Forward passes whose autograd graph is known already: sites without a function mode."""
