"""Rules of operators that make, move, view or send elements."""
