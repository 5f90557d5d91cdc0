"""How optimizer states are stored."""
