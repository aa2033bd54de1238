"""Formats of Anthropic's Messages API."""
