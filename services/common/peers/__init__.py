"""The services that a process calls: where they are, whether they serve, and what a loss is."""
