"""Batches, which the service runs by itself."""
