"""Several processes: what each rank says of itself, by the store of the process group, and what follows from it."""
