"""Rules of operators that make, move, index or send elements."""
