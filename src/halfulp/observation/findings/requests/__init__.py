"""What was asked for and is not there: dtypes, patterns, states, a resumed run's precision."""
