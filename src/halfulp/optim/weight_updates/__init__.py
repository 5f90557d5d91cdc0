"""Weight updates: how a float32 update enters a narrow parameter."""
