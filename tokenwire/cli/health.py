"""The command `health`."""

import argparse

from tokenwire.cli.arguments import Commands, add_command, add_json, add_tls, tls_of
from tokenwire.cli.output import print_error, print_json

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the command."""
    health = add_command(
        commands,
        "health",
        _health,
        "Exit with 0 if a service is ready, else with 1 and the reason.",
        "health 127.0.0.1:50052",
        "health http://127.0.0.1:8000/ready",
    )
    health.add_argument("target", help="host:port of a gRPC service, or an http(s):// URL.")
    add_tls(health)
    add_json(health)


async def _health(options: argparse.Namespace) -> int:
    from services.common.network.health import why_not_ready, why_not_serving

    target, tls = options.target, tls_of(options)
    is_url = target.startswith(("http://", "https://"))
    try:
        if is_url:
            why = await why_not_ready(target, None if tls is None else tls.context())
        else:
            why = await why_not_serving(target, tls)
    except ValueError as error:
        print_error(f"{target} is not a valid target: {error}.")
        return 1
    if options.json:
        print_json({"target": target, "serving": why is None, "reason": why})
    elif why is None:
        print("serving")
    else:
        print_error(f"{target} is not serving: {why.rstrip('.')}.")
    return 0 if why is None else 1
