"""What the requests of all tenants share: turns, room and caches, none of which one may fill."""
