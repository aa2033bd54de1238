"""Benchmarks: Tokenwire and its peers, measured the same way from outside."""
