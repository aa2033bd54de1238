"""Mixers: parts of layers that combine the tokens of a sequence. Each kind is one module."""
