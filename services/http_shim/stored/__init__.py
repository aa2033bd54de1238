"""What the shim keeps between requests."""
