"""Responses, as in OpenAI's API."""
