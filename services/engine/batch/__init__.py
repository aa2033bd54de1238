"""A step's batch: its integers, and their way to the device."""
