"""The services that a process calls: their addresses, their health, and losses of them."""
