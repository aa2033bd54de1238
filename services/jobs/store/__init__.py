"""State that outlives a request: SQLite for all but events, which are in memory."""
