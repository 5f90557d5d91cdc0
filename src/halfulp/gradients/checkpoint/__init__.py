"""Saving and loading a scaler: its state as plain data, and its pickles."""
