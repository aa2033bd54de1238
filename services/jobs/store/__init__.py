"""State that outlives a request: files, batches and responses in SQLite, events in memory."""
