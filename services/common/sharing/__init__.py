"""Turns, room and caches that all tenants share: no tenant can take them all."""
