"""Mixers: what combines the tokens of a sequence in a layer. Each kind is one module."""
