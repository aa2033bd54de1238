"""OpenAI-compatible HTTP server in front of the tokenizer services."""
