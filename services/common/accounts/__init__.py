"""Callers and their limits: API keys, the token that services share, tiers."""
