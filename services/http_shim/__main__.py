"""Entry point of the HTTP shim: `python -m services.http_shim`."""

from services.common.process import collector_paused

with collector_paused():
    from services.http_shim.server import main

main()
