"""The command `serve`."""

import argparse
import os
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.log_text import LOG_FORMATS
from services.common.model_files.keep_alive import DEFAULT_KEEP_ALIVE
from tokenwire.cli.arguments import Commands, add_command, amount_of_memory, keep_alive
from tokenwire.cli.config_file import ConfigError, ConfigFile
from tokenwire.cli.model_argument import MODEL_HELP, add_download, provide_model
from tokenwire.cli.output import print_error
from tokenwire.flag_parser import FlagParser

if TYPE_CHECKING:
    from tokenwire.serving.serve_options import ServeOptions

__all__ = ["add_commands", "add_flags"]


def add_commands(commands: Commands, file: ConfigFile) -> None:
    """Add the command. file: settings whose values hold where no flag and no variable has one."""
    serve = add_command(
        commands,
        "serve",
        _serve,
        "Start the services and run them until Ctrl-C. Flags of the services, such as "
        "--fetch-images, are handed to those that have them; `python -m services.NAME --help` "
        "lists them.",
        "serve smollm2",
        "serve models/small --model-id small",
        "serve Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M --download",
        "serve --host 0.0.0.0 --keys keys.json --log-dir /var/log/tokenwire",
        "serve --catalog catalog.toml",
        "serve --models ~/models",
        "serve --replicas 2",
    )
    add_flags(serve, file)


def add_flags(serve: FlagParser, file: ConfigFile) -> None:
    """Add the flags of the command, whose defaults come from variables and the file."""
    serve.set_defaults(service_flags=())
    serve.add_further = partial(_complete, file)
    _add_addresses(serve)
    _add_models(serve)
    _add_demand(serve)
    _add_access(serve)
    serve.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="Seconds that running requests get at shutdown (default: %(default)g).",
    )
    serve.add_argument(
        "--no-restart",
        action="store_true",
        help="Stop everything when a service ends, instead of starting it again.",
    )
    serve.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="OTLP collector (gRPC) for traces, such as http://127.0.0.1:4317.",
    )
    serve.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="auto",
        help="Form of log lines on stderr; auto = text on a terminal, else JSON. Log files have "
        "JSON.",
    )
    serve.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="Directory of a log file per service; SIGHUP opens the files again.",
    )
    serve.add_argument(
        "--log-size",
        type=amount_of_memory,
        default=64 * 2**20,
        metavar="SIZE",
        help="Size at which a log file becomes FILE.1, up to FILE.3; 0 = never (default: 64MiB).",
    )


async def _serve(options: argparse.Namespace) -> int:
    from tokenwire.serving.serve_options import ServeError, ServeOptions
    from tokenwire.serving.supervisor import supervise

    if options.model is not None and options.named_model is not None:
        print_error("MODEL and --model say the same: leave one out.")
        return 2
    _take_models_of_variables(options)
    model = options.named_model if options.model is None else options.model
    is_named = model is not None or options.model_id
    if options.catalog is not None and (
        (is_named and options.models is None) or options.chat_template is not None
    ):
        print_error("--catalog names the models; leave out MODEL, --model-id and --chat-template.")
        return 2
    try:
        names = [field.name for field in fields(ServeOptions)]
        given = {name: getattr(options, name) for name in names if hasattr(options, name)}
        given |= {"model": None, "models": _folders(options.models)}
        await supervise(await _with_models(ServeOptions(**given), model, options))
    except ServeError as error:
        print_error(str(error))
        return error.exit_code
    return 0


def _take_models_of_variables(options: argparse.Namespace) -> None:
    """Take from variables and the file what is served, unless flags say what it is.

    A flag replaces all of it: the file's model_id, say, is not the name of another model.
    """
    from tokenwire.cli.serve_settings import WHAT_IS_SERVED, variable_of

    flags = (options.named_model, options.model, options.catalog, options.models)
    if any(flag is not None for flag in flags):
        return
    for name, kind in WHAT_IS_SERVED.items():
        text = os.environ.get(variable_of(name))
        if text and not getattr(options, name):
            setattr(options, name, kind(text))


async def _with_models(
    wanted: "ServeOptions", model: str | None, options: argparse.Namespace
) -> "ServeOptions":
    """Return the options with the model's files; download what the machine does not have."""
    from tokenwire.serving.stack_layout import engine_flags, hub_checkpoints
    from tokenwire.serving.start_check import check_before_download

    check = partial(check_before_download, flags=engine_flags(wanted))
    for checkpoint, flags in hub_checkpoints(wanted).items():
        await provide_model(str(checkpoint), check=partial(check_before_download, flags=flags))
    if model is None:
        return wanted
    provided = await provide_model(model, may_download=options.download, check=check)
    named = wanted.model_id or provided.model_id
    return replace(wanted, model=provided.path, model_id=named)


def _complete(file: ConfigFile, serve: FlagParser) -> None:
    # imported here, because the other commands need no settings of services
    from tokenwire.cli.serve_settings import apply_settings, serve_settings
    from tokenwire.serving.service_flags import add_service_flags

    settings = serve_settings(serve)
    add_service_flags(serve)
    try:
        apply_settings(file, settings)
    except ConfigError as error:  # --help works all the same
        file.error = file.error or error


def _folders(stated: list[str] | None) -> tuple[Path, ...] | None:
    """Return the folders of --models; without a name, those where models are by default.

    Raises ServeError for a name that is no folder: the server would have no models.
    """
    from tokenwire.serving.model_folders import default_folders
    from tokenwire.serving.serve_options import ServeError

    if stated is None:
        return None
    names = [name for text in stated for name in text.split(os.pathsep) if name]
    folders = tuple(Path(name).expanduser() for name in names)
    for folder in folders:
        if not folder.is_dir():
            raise ServeError(f"--models: there is no directory {folder}.")
    return folders or default_folders()


def _add_addresses(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="Address that HTTP, tokenizer, engine and jobs listen on (default: %(default)s).",
    )
    for flag, port, meaning in (
        ("--port", 8000, "HTTP port"),
        ("--tokenizer-port", 50051, "gRPC port, text level"),
        ("--engine-port", 50052, "gRPC port, token level"),
        ("--grammar-port", 50053, "gRPC port, loopback only"),
        ("--jobs-port", 50054, "gRPC port, files and batches"),
    ):
        serve.add_argument(
            flag,
            type=int,
            default=port,
            metavar="PORT",
            help=f"{meaning} (default: %(default)s).",
        )
    serve.add_argument(
        "--no-jobs",
        action="store_true",
        help="Start no jobs service: files, batches, kept responses and PDFs are then refused.",
    )


def _add_models(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "named_model",
        nargs="?",
        metavar="MODEL",
        help=f"Model to serve: {MODEL_HELP}. Without one, the small one that comes with Tokenwire.",
    )
    serve.add_argument("--model", metavar="MODEL", help="The same as a flag.")
    add_download(serve)
    serve.add_argument(
        "--model-id",
        "--served-model-name",
        default="",
        help="Name to serve the model under; by default the directory's.",
    )
    serve.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja file of the chat template; by default the checkpoint's.",
    )
    serve.add_argument(
        "--catalog",
        type=Path,
        metavar="FILE",
        help="TOML file of models to serve instead; SIGHUP reloads it.",
    )
    serve.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16 or float16 (default: %(default)s).",
    )
    serve.add_argument("--engine-args", default="", help="Additional engine flags, in one string.")
    serve.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="Engines of the model, which share the cores or take a GPU each (default: 1).",
    )
    serve.add_argument(
        "--tokenizers",
        type=int,
        default=0,
        metavar="N",
        help="Tokenizer services of a model; 0 = one, or one for four cores before a GPU, up to "
        "four (default: 0).",
    )
    serve.add_argument(
        "--shims",
        type=int,
        default=0,
        metavar="N",
        help="Processes that serve HTTP on the same port; 0 = as for --tokenizers (default: 0).",
    )


def _add_demand(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--models",
        nargs="?",
        const="",
        action="append",
        metavar="DIR",
        help="Serve every model of a folder, each loaded when a request names it; may be repeated. "
        "Without DIR, the models of the hub's cache.",
    )
    serve.add_argument(
        "--memory",
        type=amount_of_memory,
        default=0,
        metavar="SIZE",
        help="Memory of all models on demand together, such as 12GiB (default: 80%% of what is "
        "free at the start).",
    )
    serve.add_argument(
        "--max-loaded",
        type=int,
        default=64,
        metavar="N",
        help="Models on demand in memory, at most (default: %(default)s).",
    )
    serve.add_argument(
        "--keep-alive",
        type=keep_alive,
        default=DEFAULT_KEEP_ALIVE,
        metavar="TIME",
        help="Time after its last use at which a model on demand is unloaded; 0 = at once, "
        "negative = never (default: 5m).",
    )
    serve.add_argument(
        "--load-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="Longest wait of a request for the load of its model (default: %(default)g).",
    )
    serve.add_argument(
        "--manager-port",
        type=int,
        default=50055,
        metavar="PORT",
        help="gRPC port of the models on demand, loopback only (default: %(default)s).",
    )
    serve.add_argument(
        "--packed-size",
        type=amount_of_memory,
        default=16 * 2**30,
        metavar="SIZE",
        help="Size of the packed weights of models on demand that are kept in ~/.cache/tokenwire, "
        "so that the next load reads them; 0 = none (default: 16GiB).",
    )
    serve.add_argument(
        "--no-spare",
        action="store_true",
        help="Prepare no processes for the next model on demand: its load then takes seconds more.",
    )


def _add_access(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--keys", type=Path, metavar="FILE", help="File of API keys; by default none is required."
    )
    serve.add_argument(
        "--peer-token-file",
        type=Path,
        metavar="FILE",
        help="Token of the services among themselves; with --keys, one is made by default.",
    )
    serve.add_argument(
        "--limits-url",
        default="",
        metavar="URL",
        help="Redis that counts the limits of keys for several servers [TOKENWIRE_LIMITS_URL].",
    )
    serve.add_argument(
        "--open", action="store_true", help="Allow a host beyond loopback without keys."
    )
    serve.add_argument(
        "--plaintext",
        action="store_true",
        help="With --keys, serve gRPC on --host too, where keys travel in clear text.",
    )
    serve.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="Certificate (PEM); HTTPS in place of HTTP."
    )
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="Key of --tls-cert (PEM).")
    serve.add_argument(
        "--cors-origins",
        default="",
        help="Origins whose web pages may use the API, separated by commas; * = all.",
    )
    serve.add_argument(
        "--allowed-hosts",
        default="",
        help="Host names that HTTP requests may use besides those of loopback; * = any.",
    )
