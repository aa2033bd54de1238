"""The commands `ps` and `stop`: servers that run, and their models."""

import argparse
import asyncio
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from services.common.host_memory import in_units
from tokenwire.cli.arguments import (
    Commands,
    add_command,
    add_json,
    add_key,
    add_tls,
    key_for,
    key_of,
    tls_of,
    url_of,
    whole_number,
)
from tokenwire.cli.output import print_error, print_json, print_text
from tokenwire.cli.table import print_table
from tokenwire.serving.running_servers import RunningServer, running_servers

if TYPE_CHECKING:
    from tokenwire.cli.server_listing import ServerListing

__all__ = ["add_commands"]

_MOST_PID = 2**22
_COLUMNS = ("MODEL", "STATE", "MEMORY", "CONTEXT", "SINCE", "IDLE UNTIL")


def add_commands(commands: Commands) -> None:
    """Add both commands."""
    listing = add_command(
        commands,
        "ps",
        _ps,
        "List the running servers of this user, and their models.",
        "ps",
        "ps --url http://127.0.0.1:8000 --json",
    )
    listing.add_argument("--url", type=url_of, help="Any server in place of those of this user.")
    listing.add_argument("--all", action="store_true", help="List models that are not in memory.")
    stop = add_command(
        commands,
        "stop",
        _stop,
        "Stop the server that `tokenwire run` started, or unload one of its models.",
        "stop",
        "stop smollm2",
        "stop --pid 1234",
    )
    stop.add_argument("model", nargs="?", metavar="MODEL", help="Model to unload.")
    stop.add_argument(
        "--pid", type=whole_number(1, _MOST_PID), help="Server to stop: a number that `ps` shows."
    )
    for parser in (listing, stop):
        add_tls(parser)
        add_key(parser)
        add_json(parser)


async def _ps(options: argparse.Namespace) -> int:
    from tokenwire.cli.server_listing import listing_of

    tls = tls_of(options)
    context = None if tls is None else tls.context()
    asked: list[tuple[str, RunningServer | None]] = [(options.url, None)]
    if not options.url:
        asked = [(server.url, server) for server in running_servers()]
    key = key_for(options.url, options) if options.url else key_of(options)
    listings = [
        await asyncio.to_thread(listing_of, url, server, key, context) for url, server in asked
    ]
    if options.json:
        print_json({"servers": [each.as_json() for each in listings]})
    elif not listings:
        print("No server of yours runs; `tokenwire run MODEL` and `tokenwire serve` start one.")
    else:
        for index, each in enumerate(listings):
            _print_listing(each, after=index > 0, everything=options.all)
    return 1 if any(each.problem for each in listings) else 0


def _print_listing(listing: "ServerListing", *, after: bool, everything: bool) -> None:
    if after:
        print()
    parts = [listing.url]
    if (own := listing.server) is not None:
        parts += [f"pid {own.pid}", "background" if own.is_background else "foreground"]
        parts.append(f"up {_span(time.time() - own.since)}")
    if listing.memory_bytes is not None:
        parts.append(f"{in_units(listing.memory_bytes)} of memory")
    print(", ".join(parts))
    if listing.problem:
        print_text(f"  {listing.problem}")
        return
    shown = [each for each in listing.models if everything or each["state"] != "idle"]
    if shown:
        print_table(_COLUMNS, [_cells(each) for each in shown], indent="  ")
    for each in shown:
        if each["error"]:
            print_text(f"  {each['id']}: {each['error']}")
    if hidden := len(listing.models) - len(shown):
        print(f"  {hidden} more {'model is' if hidden == 1 else 'models are'} not in memory: --all")


def _cells(model: dict[str, Any]) -> tuple[str, ...]:
    now = time.time()
    state = model["state"]
    if state == "loading" and model["progress"] is not None:
        state = f"loading {model['progress']:.0%}"
    memory, context = model["memory_bytes"], model["context"]
    since, until = model["since"], model["idle_until"]
    return (
        model["id"],
        state,
        "–" if memory is None else in_units(memory),
        "–" if context is None else f"{context:,}",
        "–" if since is None else f"{_span(now - since)} ago",
        "–" if until is None else f"in {_span(until - now)}",
    )


def _span(seconds: float) -> str:
    """Return a time in its largest unit."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


async def _stop(options: argparse.Namespace) -> int:
    servers = running_servers()
    if options.model is not None:
        return await _unload(options, servers)
    server = _chosen(options.pid, servers)
    if isinstance(server, str):
        print_error(server)
        return 1
    await _end(server)
    if options.json:
        print_json({"stopped": server.url, "pid": server.pid})
    else:
        print(f"Stopped {server.name}.")
    return 0


def _chosen(pid: int | None, servers: Sequence[RunningServer]) -> RunningServer | str:
    """Return the server to stop, or the sentence that says why there is none."""
    if pid is not None:
        found = [each for each in servers if each.pid == pid]
        return found[0] if found else f"No server of yours has pid {pid}; see `tokenwire ps`."
    background = [each for each in servers if each.is_background]
    if background:
        return background[0]
    if servers:
        other = servers[0]
        return (
            f"No server runs in the background; `tokenwire stop --pid {other.pid}` stops that of "
            f"{other.url}."
        )
    return "No server of yours runs."


async def _end(server: RunningServer) -> None:
    """Send SIGTERM, and wait until the process has ended."""
    try:
        handle = os.pidfd_open(server.pid)
    except ProcessLookupError:
        return
    try:
        # the handle keeps its process, so this can't meet another one with the same number
        if server.is_alive():
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            await asyncio.to_thread(_until_ended, handle)
    finally:
        os.close(handle)


def _until_ended(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()


async def _unload(options: argparse.Namespace, servers: Sequence[RunningServer]) -> int:
    """Unload a model of the first server that has it in memory."""
    from tokenwire.cli.server_listing import HttpServer, listing_of, unload

    tls = tls_of(options)
    context = None if tls is None else tls.context()
    key = key_of(options)
    names: list[str] = []
    for server in servers:
        if options.pid is not None and server.pid != options.pid:
            continue
        listing = await asyncio.to_thread(listing_of, server.url, server, key, context)
        names += [each["id"] for each in listing.models if each["state"] != "idle"]
        if options.model not in [each["id"] for each in listing.models]:
            continue
        problem = await asyncio.to_thread(
            unload, HttpServer(server.url, key, context), options.model
        )
        if problem:
            print_error(problem)
            return 1
        if options.json:
            print_json({"unloaded": options.model, "url": server.url})
        else:
            print_text(f"Unloaded {options.model}; {server.name} runs on.")
        return 0
    there = f"In memory: {', '.join(names)}." if names else "No model is in memory."
    print_error(f"No server of yours has {options.model}. {there}")
    return 1
