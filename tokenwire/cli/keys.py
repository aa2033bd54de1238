"""The command `keys`: make, list and revoke API keys."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from tokenwire.cli.arguments import Commands, add_command, add_json, whole_number
from tokenwire.cli.output import print_error, print_json
from tokenwire.cli.visible_text import visible

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the command and its actions."""
    keys = add_command(commands, "keys", _keys, "Make, list and revoke API keys.")
    actions = keys.add_subparsers(metavar="ACTION", required=True)
    new = add_command(
        actions,
        "add",
        _keys,
        "Make a key and print it once; create the file if it is missing.",
        "keys add --file keys.json --name alice",
    )
    new.add_argument(
        "--tier", default="default", help="One of the file's tiers (default: %(default)s)."
    )
    new.add_argument("--name", default="", help="Owner, shown by `list`.")
    new.add_argument(
        "--admin",
        action="store_true",
        help="Let the key operate the server: usage of all keys, models that load and unload.",
    )
    new.add_argument(
        "--monthly-tokens",
        type=whole_number(1, 2**53),
        metavar="N",
        help="Budget of a calendar month (UTC), in place of the tier's.",
    )
    listing = add_command(
        actions, "list", _keys, "Print id, tier, creation date, state and name of each key."
    )
    revoke = add_command(
        actions,
        "revoke",
        _keys,
        "Revoke a key; servers notice within a second.",
        "keys revoke q7Xk2mPd",
    )
    revoke.add_argument("key", help="Id of the key, or the key itself.")
    for sub, action in ((new, _add_key), (listing, _list_keys), (revoke, _revoke_key)):
        sub.add_argument(
            "--file",
            type=Path,
            default=Path("keys.json"),
            help="The keys file (default: %(default)s).",
        )
        add_json(sub)
        sub.set_defaults(action=action)


async def _keys(options: argparse.Namespace) -> int:
    from services.common.accounts.key_file import KeyFileError

    try:
        options.action(options)
    except KeyFileError as error:
        print_error(str(error))
        return 1
    return 0


def _add_key(options: argparse.Namespace) -> None:
    from services.common.accounts.key_file import add_key

    key = add_key(
        options.file,
        options.tier,
        options.name,
        admin=options.admin,
        monthly_tokens=options.monthly_tokens,
    )
    if options.json:
        print_json({"key": key})
    else:
        print(key)
    print("tokenwire: store this key now; it is not shown again", file=sys.stderr)


def _list_keys(options: argparse.Namespace) -> None:
    from services.common.accounts.key_file import read_keys

    keys = read_keys(options.file).keys
    if options.json:
        rows = [
            {
                "id": key.id,
                "tier": key.tier,
                "name": key.name,
                "created": key.created,
                "revoked": key.revoked,
                "admin": key.admin,
                "monthly_tokens": key.monthly_tokens,
            }
            for key in keys
        ]
        print_json({"keys": rows})
        return
    for key in keys:
        state = "active" if key.revoked is None else f"revoked {_day(key.revoked)}"
        if key.admin:
            state += ", admin"
        name = visible(key.name).replace("\n", " ")
        print(f"{key.id}\t{key.tier}\t{_day(key.created)}\t{state}\t{name}")


def _revoke_key(options: argparse.Namespace) -> None:
    from services.common.accounts.key_file import key_id, revoke_key

    key = revoke_key(options.file, key_id(options.key))
    if options.json:
        print_json({"revoked": key.id})
    else:
        print(f"{key.id} is revoked")


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
