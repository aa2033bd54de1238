"""Scheduling policy, without torch: the tokens that each step computes, and their KV blocks."""
