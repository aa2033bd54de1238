"""The commands `list`, `show` and `rm`: models on this machine's disk."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tokenwire.cli.arguments import Commands, add_command, add_json
from tokenwire.cli.model_argument import MODEL_HELP, asks, in_decimal_units
from tokenwire.cli.output import JsonObject, print_error, print_json
from tokenwire.cli.table import print_table
from tokenwire.serving.state_folder import used_at

if TYPE_CHECKING:
    from services.common.model_files.disk_models import DiskModel
    from tokenwire.serving.model_facts import ModelFacts

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    listing = add_command(
        commands,
        "list",
        _list,
        "List the models on this machine: those in the hub's cache, or below a folder.",
        "list",
        "list --available",
        "list --models /data/models --json",
    )
    listing.add_argument(
        "--available", action="store_true", help="List the models that have a short name instead."
    )
    listing.add_argument(
        "--models", type=Path, metavar="DIR", help="List the models below this folder instead."
    )
    add_json(listing)
    show = add_command(
        commands,
        "show",
        _show,
        "Show what a model on this machine is, and the memory that it takes.",
        "show smollm2",
        "show models/small --json",
    )
    show.add_argument("model", metavar="MODEL", help=f"Model: {MODEL_HELP}.")
    add_json(show)
    removal = add_command(
        commands,
        "rm",
        _rm,
        "Remove a model from the hub's cache.",
        "rm smollm2",
        "rm Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M --yes",
    )
    removal.add_argument("model", metavar="MODEL", help="Name that `tokenwire list` prints.")
    removal.add_argument("--yes", action="store_true", help="Remove it without a question.")


async def _list(options: argparse.Namespace) -> int:
    from services.common.model_files.disk_models import models_in_cache, models_in_folder

    if options.available:
        _print_available(as_json=options.json)
        return 0
    if options.models is None:
        models = models_in_cache()
    elif options.models.is_dir():
        models = models_in_folder(options.models)
    else:
        print_error(f"There is no directory {options.models}.")
        return 2
    if options.json:
        print_json({"models": [_row(model) for model in models]})
    elif models:
        print_table(
            ("NAME", "SIZE", "QUANTISATION", "CONTEXT", "LAST USE"),
            [_cells(model) for model in models],
        )
    else:
        print_error("no models yet: `tokenwire pull smollm2` downloads one.")
    return 0


def _print_available(*, as_json: bool) -> None:
    from services.common.model_files.short_list import listed_models

    rows = listed_models()
    if as_json:
        keys = ("name", "source", "purpose", "parameters", "licence", "context")
        print_json(
            {
                "models": [
                    {key: getattr(row, key) for key in keys}
                    | {"download_bytes": row.download * 10**6, "memory_bytes": row.memory * 10**6}
                    for row in rows
                ]
            }
        )
        return
    print_table(
        ("NAME", "PARAMETERS", "FOR", "DOWNLOAD", "MEMORY", "CONTEXT", "LICENCE"),
        [
            (
                row.name,
                row.parameters,
                row.purpose,
                in_decimal_units(row.download * 10**6),
                in_decimal_units(row.memory * 10**6),
                f"{row.context:,}",
                row.licence,
            )
            for row in rows
        ],
    )


def _row(model: "DiskModel") -> JsonObject:
    used = used_at(model.path)
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.num_bytes,
        "quantisation": model.quantisation or None,
        "context": model.context,
        "architecture": model.architecture or None,
        "complete": model.is_complete,
        "last_used": None if used is None else int(used),
    }


def _cells(model: "DiskModel") -> tuple[str, ...]:
    used = used_at(model.path)
    if not model.is_complete:
        state = "incomplete: `tokenwire pull` continues"
    else:
        state = "never" if used is None else _time(used)
    return (
        model.name,
        in_decimal_units(model.num_bytes),
        model.quantisation or "-",
        "-" if model.context is None else f"{model.context:,}",
        state,
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


async def _show(options: argparse.Namespace) -> int:
    from services.common.model_files.model_name import find_model
    from tokenwire.serving.model_facts import read_facts
    from tokenwire.serving.serve_options import ServeError

    named = find_model(options.model)
    path = named.on_disk()
    if path is None:
        command = f"tokenwire pull {options.model}"
        print_error(f"{options.model} is not on this machine: `{command}` downloads it.")
        return 1
    try:
        facts = await read_facts(path)
    except ServeError as error:
        print_error(str(error))
        return 1
    licence = facts.licence or (named.listed.licence if named.listed is not None else "")
    if options.json:
        print_json(_facts_as_json(options.model, path, licence, facts))
    else:
        _print_facts(options.model, path, licence, facts)
    return 0


def _facts_as_json(name: str, path: Path, licence: str, facts: "ModelFacts") -> JsonObject:
    used, chat = used_at(path), facts.chat
    return {
        "name": name,
        "path": str(path),
        "architecture": facts.architecture,
        "generates": facts.generates,
        "parameters": facts.parameters,
        "context": facts.context,
        "layers": facts.files.layers or None,
        "width": facts.files.width or None,
        "vocabulary": facts.vocabulary,
        "bytes": facts.files.num_bytes,
        "quantisation": facts.files.quantization or None,
        "bytes_by_type": dict(facts.bytes_by_type),
        "licence": licence or None,
        "chat_template": chat.has_template,
        "tools": {"shown_by_template": chat.shows_tools, "format": chat.tool_format or None},
        "reasoning_format": chat.reasoning_format or None,
        "memory_bytes": dict(facts.memory),
        "gpu_memory_bytes": dict(facts.gpu_memory),
        "cache_bytes": facts.cache_bytes,
        "state_bytes": facts.state_bytes,
        "last_used": None if used is None else int(used),
    }


def _print_facts(name: str, path: Path, licence: str, facts: "ModelFacts") -> None:
    chat, files, used = facts.chat, facts.files, used_at(path)
    rows = [
        ("name", name),
        ("path", str(path)),
        ("architecture", facts.architecture),
        ("parameters", "unknown" if facts.parameters is None else _count(facts.parameters)),
        ("context", "unknown" if facts.context is None else f"{facts.context:,} tokens"),
        ("layers", f"{files.layers or 'unknown'}, width {files.width or 'unknown'}"),
        ("vocabulary", "unknown" if facts.vocabulary is None else f"{facts.vocabulary:,} tokens"),
        ("quantisation", _stored(facts)),
        ("licence", licence or "not stated"),
    ]
    if facts.generates:
        by = "the template's" if chat.shows_tools else "described by Tokenwire,"
        tools = f"{by} {chat.tool_format}" if chat.has_template else "none"
        rows += [
            ("chat template", "yes" if chat.has_template else "no"),
            ("tools", tools),
            ("reasoning", chat.reasoning_format or "none"),
        ]
    names = dict.fromkeys((*facts.memory, *facts.gpu_memory))
    rows += [(f"--weights {name}", _memory(facts, name)) for name in names]
    if facts.cache_bytes:
        cached = in_decimal_units(facts.cache_bytes)
        rows.append(
            ("KV cache", f"{cached} for the whole context; half with --kv-dtype fp8 or int8")
        )
    if facts.state_bytes:
        rows.append(("states", f"{in_decimal_units(facts.state_bytes)} for a text of any length"))
    rows.append(("last use", "never" if used is None else _time(used)))
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label.ljust(width)}  {value}")


def _memory(facts: "ModelFacts", name: str) -> str:
    """Return the memory of the weights on each device that has this value of --weights."""
    by_device = (("a CPU", facts.memory), ("a GPU", facts.gpu_memory))
    sizes = [
        f"{in_decimal_units(memory[name])} on {device}"
        for device, memory in by_device
        if name in memory
    ]
    return ", ".join(sizes)


def _stored(facts: "ModelFacts") -> str:
    """Return the quantisation, the size of the files, and the types that take most of it."""
    files, by_type = facts.files, facts.bytes_by_type
    total = sum(by_type.values())
    shares = [(name, 100 * num_bytes / total) for name, num_bytes in by_type.items()]
    most = [f"{name} {share:.0f}%" for name, share in shares if share >= 0.5]
    size = f"{files.quantization or 'unknown'}, {in_decimal_units(files.num_bytes)}"
    return f"{size} ({', '.join(most)})" if len(most) > 1 else size


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


async def _rm(options: argparse.Namespace) -> int:
    from services.common.model_files.removal import (
        RemovalError,
        freed_bytes,
        process_using,
        remove,
    )

    model = _removable(options.model)
    if model is None:
        print_error(
            f"There is no {options.model} in the hub's cache; `tokenwire list` shows what is there."
        )
        return 1
    if (process := process_using(model)) is not None:
        print_error(f"{model.name} is in use by process {process}: stop it first.")
        return 1
    size = in_decimal_units(freed_bytes(model))
    if not options.yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            print_error(f"{model.name} takes {size}; --yes removes it without a question.")
            return 2
        if not asks(f"Remove {model.name} ({size}, {model.path})?"):
            return 1
    try:
        remove(model)
    except RemovalError as error:
        print_error(str(error))
        return 1
    print(f"{model.name} is removed: {size}")
    return 0


def _removable(text: str) -> "DiskModel | None":
    """Return the model of the hub's cache that a name or a path means."""
    from services.common.model_files.disk_models import models_in_cache
    from services.common.model_files.model_name import ModelNameError, find_model

    models = models_in_cache()
    by_name = next((model for model in models if text in (model.name, f"hf:{model.name}")), None)
    if by_name is not None:
        return by_name
    try:
        path = find_model(text).on_disk()
    except ModelNameError:
        return None
    if path is None:
        return None
    return next((model for model in models if model.path.absolute() == path.absolute()), None)
