"""Elementary functions of expansions."""
