"""Completions, as in OpenAI's API."""
