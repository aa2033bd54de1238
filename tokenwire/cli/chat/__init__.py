"""Interactive chat in the terminal. It needs the packages of the extra `cli`."""
