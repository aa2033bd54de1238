"""Jobs service: files, batches, kept responses, and responses in the background."""
