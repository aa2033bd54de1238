"""A step's batch: its integers, and their transfer to the device."""
