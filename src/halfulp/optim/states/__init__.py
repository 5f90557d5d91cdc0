"""Codecs of optimizer states: how each is stored and loaded."""
