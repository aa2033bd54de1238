"""Dialects: the JSON forms of requests to generate, and of their answers."""
