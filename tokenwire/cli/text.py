"""The commands `tokenize`, `detokenize` and `models`."""

import argparse

from tokenwire.cli import result_objects
from tokenwire.cli.arguments import (
    Commands,
    add_command,
    add_json,
    add_target,
    connected,
    read_text,
)
from tokenwire.cli.output import print_json
from tokenwire.errors import invalid

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the three commands."""
    tokenize = add_command(
        commands,
        "tokenize",
        _tokenize,
        "Print id and text of each token of a text, one per line.",
        'tokenize "def add(a, b):"',
    )
    tokenize.add_argument("text", help="The text; - reads standard input.")
    detokenize = add_command(
        commands,
        "detokenize",
        _detokenize,
        "Print the text of token ids.",
        "detokenize 262 1041",
        "tokenize 'x = 1' | cut -f 1 | tokenwire detokenize -",
    )
    detokenize.add_argument("ids", nargs="+", help="Token ids; - reads them from standard input.")
    detokenize.add_argument("--special", action="store_true", help="Keep special tokens.")
    models = add_command(commands, "models", _models, "List the served models.", "models --json")
    for parser in (tokenize, detokenize, models):
        add_json(parser)
        add_target(parser)


async def _tokenize(options: argparse.Namespace) -> int:
    text = read_text(options.text, "text")
    async with connected(options) as client:
        encoding = await client.encode(text)
    tokens = [_readable(piece) for piece in encoding.pieces]
    if options.json:
        print_json({"ids": encoding.ids, "tokens": tokens})
        return 0
    for identity, token in zip(encoding.ids, tokens, strict=True):
        print(f"{identity}\t{token}")
    return 0


async def _detokenize(options: argparse.Namespace) -> int:
    words = [word for each in options.ids for word in read_text(each, "ids").split()]
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise invalid("", f"A token id must be a whole number, got {word!r}.")
    async with connected(options) as client:
        text = await client.decode(list(map(int, words)), skip_special_tokens=not options.special)
    if options.json:
        print_json({"text": text})
    else:
        print(text)
    return 0


async def _models(options: argparse.Namespace) -> int:
    async with connected(options) as client:
        models = await client.models()
    if options.json:
        print_json({"models": [result_objects.model(model) for model in models]})
        return 0
    for model in models:
        can = [name for name in ("infill", "grammar", "chat") if getattr(model, name)]
        print(f"{model.id}\tcontext {model.context_length}\t{' '.join(can)}")
    return 0


def _readable(piece: bytes) -> str:
    """Return the text of a token on one line; bytes of an incomplete character are escaped."""
    text = piece.decode("utf-8", "backslashreplace")
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )
