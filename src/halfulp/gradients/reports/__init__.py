"""What a scaler tells of its sites and steps: tables, and files that are written as it trains."""
