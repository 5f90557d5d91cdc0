"""Rules of functions of one element each."""
