"""What finished trials say together: statistics, rows and the finding in words."""
