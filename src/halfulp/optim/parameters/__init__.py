"""Parameters as the optimizer keeps them: plans, memory, identities, narrowing, and writes from outside."""
