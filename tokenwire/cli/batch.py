"""The command `batch`: run the requests of a file in the form of OpenAI's batch API."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tokenwire.cli.arguments import (
    Commands,
    add_command,
    add_key,
    add_tls,
    add_url,
    key_for,
    tls_of,
)
from tokenwire.cli.arguments import whole_number as whole
from tokenwire.cli.output import print_error

if TYPE_CHECKING:
    from tokenwire.batch_run import BatchRun, BatchSummary

__all__ = ["add_commands"]

_PROGRESS_SECONDS = 0.5
_LOWEST = 2**31 - 1
_SHOWN_REASONS = 3


def add_commands(commands: Commands) -> None:
    """Add the command."""
    batch = add_command(
        commands,
        "batch",
        _batch,
        "Run the requests of a JSONL file, and write the answers to another.",
        "batch input.jsonl output.jsonl",
        "batch input.jsonl output.jsonl --url https://models.example.org --tls-ca ca.pem",
    )
    batch.add_argument(
        "input",
        type=Path,
        help='Lines such as {"custom_id": "1", "url": "/v1/completions", "body": {…}}.',
    )
    batch.add_argument(
        "output",
        type=Path,
        help="Answers, in the order in which they come. Requests that it has answers to are not "
        "run again.",
    )
    add_url(batch)
    batch.add_argument(
        "--concurrency",
        type=whole(1, 1024),
        default=64,
        metavar="N",
        help="Requests in progress at once (default: %(default)s).",
    )
    batch.add_argument(
        "--priority",
        type=whole(0, _LOWEST),
        default=1000,
        metavar="N",
        help="Priority of requests that have none, lower first; interactive ones have 0. "
        "0 = send none (default: %(default)s).",
    )
    batch.add_argument(
        "--patience",
        type=whole(0, 86_400),
        default=600,
        metavar="SECONDS",
        help="Time for which a request is repeated while the server is full or away "
        "(default: %(default)s).",
    )
    add_tls(batch)
    add_key(batch)


async def _batch(options: argparse.Namespace) -> int:
    # imported here, because the other commands need no HTTP client
    from tokenwire.batch_run import BatchRun, InputError
    from tokenwire.cli.http_sender import HttpSender

    key, tls = key_for(options.url, options), tls_of(options)
    sender = HttpSender(options.url.rstrip("/"), key, None if tls is None else tls.context())
    run = BatchRun(
        options.input,
        options.output,
        connect=sender.connect,
        concurrency=options.concurrency,
        priority=options.priority,
        patience=options.patience,
    )
    showing = asyncio.create_task(_show_progress(run))
    try:
        summary = await run.run()
    except InputError as error:
        print_error(str(error))
        return 2
    finally:
        showing.cancel()
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print_error(summary.text)
    _print_reasons(summary, options.output)
    return 0 if summary.failed == 0 else 1


def _print_reasons(summary: "BatchSummary", output: Path) -> None:
    """Print the first reasons of failures, each once."""
    for sentence, reason in list(summary.reasons.items())[:_SHOWN_REASONS]:
        others = f" (and {reason.count - 1:,} other lines)" if reason.count > 1 else ""
        print_error(f"line {reason.line}{others}: {sentence}")
    if len(summary.reasons) > _SHOWN_REASONS:
        print_error(f"{output} has the reasons of all failures.")


async def _show_progress(run: "BatchRun") -> None:
    """Show the state in a line of the terminal, if there is one."""
    if not sys.stderr.isatty():
        return
    while True:
        summary = run.summary
        ended = summary.answered + summary.failed + summary.skipped
        share = ended / summary.total if summary.total else 1.0
        bar = ("#" * int(20 * share)).ljust(20, "-")
        print(f"\r\x1b[K[{bar}] {summary.text}", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(_PROGRESS_SECONDS)
