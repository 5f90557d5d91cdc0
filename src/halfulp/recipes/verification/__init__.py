"""hu.verify: a proof on a given model that a recipe changes nothing in float32, or the operator that does."""
