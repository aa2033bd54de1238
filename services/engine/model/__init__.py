"""The decoder: its spec, its weights and its forward pass."""
