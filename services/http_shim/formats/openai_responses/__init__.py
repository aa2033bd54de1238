"""Formats of OpenAI's Responses API."""
