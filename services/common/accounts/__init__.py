"""Who calls, and how much: API keys, the services' own token, limits of tiers."""
