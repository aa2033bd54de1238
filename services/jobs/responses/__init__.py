"""Responses that are kept, and those that run in the background."""
