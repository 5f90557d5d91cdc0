"""Rules of the operators behind layers of networks."""
