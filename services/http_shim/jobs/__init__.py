"""The jobs service as the shim uses it."""
