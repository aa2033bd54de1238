"""Text to token ids and back, and completions at text level, in front of an engine."""
