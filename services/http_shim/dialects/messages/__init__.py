"""Messages, as in Anthropic's API."""
