"""`python -m tokenwire`: the `tokenwire` command."""

from tokenwire.cli import main

main()
