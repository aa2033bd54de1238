"""The command `usage`: tokens and requests by day, model and API key."""

import argparse
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tokenwire.cli.arguments import (
    Commands,
    add_command,
    add_json,
    add_key,
    add_tls,
    add_url,
    key_for,
    tls_of,
)
from tokenwire.cli.output import print_error, print_json
from tokenwire.cli.table import print_table

if TYPE_CHECKING:
    from tokenwire.cli.usage_pages import UsageError

__all__ = ["add_commands"]

_COLUMNS = {
    "requests": "num_model_requests",
    "failed": "num_failed_requests",
    "input": "input_tokens",
    "cached": "input_cached_tokens",
    "output": "output_tokens",
}
"""Field of a result by the title of its column"""
_FLAGS = {"group_by": "--by", "start": "--start", "end": "--end"}
"""Flag by the parameter of the query that has its value"""
_PARAMETER = re.compile(rf"(?<![\w'])({'|'.join(_FLAGS)})(?![\w'])")
"""A parameter's name in a sentence, outside quotation marks"""


def add_commands(commands: Commands) -> None:
    """Add the command."""
    usage = add_command(
        commands,
        "usage",
        _usage,
        "Print tokens and requests of the API key by day, or of all keys with an admin key.",
        "usage --key-file alice.key",
        "usage --key-file admin.key --by day,key --start 2026-11-01",
    )
    usage.add_argument("--start", help="First day, such as 2026-11-01 (default: 30 days ago).")
    usage.add_argument("--end", help="Day after the last one (default: tomorrow).")
    usage.add_argument(
        "--by",
        default="day,model",
        metavar="COLUMNS",
        help="What to divide by: day, model, key, separated by commas (default: %(default)s).",
    )
    usage.add_argument("--of", metavar="KEY", help="Only this key, by its id or name.")
    add_url(usage)
    add_tls(usage)
    add_key(usage)
    add_json(usage)


async def _usage(options: argparse.Namespace) -> int:
    from tokenwire.cli.usage_pages import UsageError, read_usage

    asked = {"start": options.start, "end": options.end, "key": options.of, "group_by": options.by}
    query = {name: value for name, value in asked.items() if value}
    tls = tls_of(options)
    headers = [("accept", "application/json")]
    if key := key_for(options.url, options):
        headers.append(("authorization", f"Bearer {key}"))
    context = None if tls is None else tls.context()
    try:
        buckets = await read_usage(options.url.rstrip("/"), query, headers, context)
    except UsageError as error:
        print_error(_sentence(error))
        return 1
    if options.json:
        print_json({"object": "page", "data": buckets, "has_more": False, "next_page": None})
    else:
        _print_table(buckets, {name.strip() for name in options.by.split(",")})
    return 0


def _sentence(error: "UsageError") -> str:
    """Return the message of an error, with the flag in place of the parameter at fault."""
    if error.parameter not in _FLAGS:
        return str(error)
    return _PARAMETER.sub(lambda match: _FLAGS[match[1]], str(error))


def _print_table(buckets: list[Any], by: set[str]) -> None:
    names = [name for name in ("day", "key", "model") if name in by]
    rows = [
        [*_labels(names, bucket, result), *(f"{result[field]:,}" for field in _COLUMNS.values())]
        for bucket in buckets
        for result in bucket["results"]
    ]
    if rows:
        print_table([*names, *_COLUMNS], rows, numbers=len(_COLUMNS))
    else:
        print("No requests in these days.")


def _labels(names: Sequence[str], bucket: Any, result: Any) -> list[str]:
    day = datetime.fromtimestamp(bucket["start_time"], UTC).date().isoformat()
    key = result["api_key_name"] or result["api_key_id"] or "-"
    labels = {"day": day, "key": key, "model": result["model"] or "-"}
    return [labels[name] for name in names]
