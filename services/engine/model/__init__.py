"""Decoder-only transformer: architecture, weights, operators, attention, forward pass."""
