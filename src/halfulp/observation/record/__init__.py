"""What an observation keeps: counts per tensor, parameter and step; nothing that grows with a run's length."""
