"""Batches that the server runs by itself."""
