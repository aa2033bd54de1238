"""`python -m tokenwire` is the command `tokenwire`."""

from tokenwire.cli import main

main()
