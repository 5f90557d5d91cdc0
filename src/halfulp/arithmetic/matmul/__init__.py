"""Products of matrices of expansions: by a wider type, by exact slices, or entry by entry."""
