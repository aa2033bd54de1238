"""State of the shim that outlives a request."""
