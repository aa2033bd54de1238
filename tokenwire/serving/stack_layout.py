"""Which services `tokenwire serve` runs, and where each of them listens.

Four serve one model. For a catalog there is one shim, and a tokenizer, an engine and a grammar
service for each checkpoint that it names.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from tokenwire.serving.catalog import CatalogError, CatalogModel, read_catalog
from tokenwire.serving.exposure import why_closed
from tokenwire.serving.ports import address, reachable, why_unusable

__all__ = [
    "CatalogPlan",
    "Checkpoint",
    "Layout",
    "ServeError",
    "Service",
    "embedded_checkpoint",
    "plan",
    "plan_catalog",
    "require_free_ports",
    "shim_of_catalog",
]

_METRICS_OFFSET = 1000
_LAST_PORT = 65535
_LONGEST_GRACE = 2**31 - 1  # seconds, of each service too
_OURS = {"--host", "--port", "--grace", "--model", "--model-id", "--dtype", "--grammar"}
"""Flags of an engine by which it would not fit the other services"""
Checkpoint: TypeAlias = tuple[Path, str, str]  # directory, dtype, flags of the engine
_Ports: TypeAlias = tuple[int, int, int]  # tokenizer, engine, grammar
_INSTALLED = Path(__file__).resolve().parents[1] / "models"
_CHECKPOINTS = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "models"
"""Folder of the embedded checkpoint: within an installed package, else in the checkout"""


class ServeError(Exception):
    """The stack can't start, or can't go on. The message is one sentence; `exit_code` 2 or 1."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is to be served, and where. Raises ServeError for numbers that can't be."""

    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer_port: int = 50051
    engine_port: int = 50052
    grammar_port: int = 50053
    model: Path | None = None
    """Directory of a checkpoint; None = the embedded one"""
    model_id: str = ""
    """The name under which it is served; empty = the directory's"""
    catalog: Path | None = None
    """Models to serve instead; their services get free ports from `tokenizer_port` on"""
    keys: Path | None = None
    """API keys; with them, only HTTP is served beyond loopback"""
    dtype: str = "auto"
    engine_args: str = ""
    """Further flags of the engine, as on a shell's command line"""
    open: bool = False
    """Allow a host beyond loopback without API keys"""
    cors_origins: str = ""
    """Origins whose pages may use the API, separated by commas; "*" = all"""
    allowed_hosts: str = ""
    """Names under which HTTP may be asked besides those of loopback, separated by commas"""
    grace: float = 30.0
    """Seconds that running requests get when the stack stops"""
    log_dir: Path | None = None
    """A file per service there, instead of stderr"""

    def __post_init__(self) -> None:
        _require_port("HTTP", self.port)
        _require_port("tokenizer", self.tokenizer_port)
        _require_port("engine", self.engine_port)
        _require_port("grammar", self.grammar_port)
        if not 0 <= self.grace <= _LONGEST_GRACE:
            raise ServeError(f"--grace must be between 0 and {_LONGEST_GRACE}, not {self.grace}.")


@dataclass(frozen=True, slots=True)
class Service:
    """One process: `python -m services.NAME ARGUMENTS`."""

    name: str
    arguments: tuple[str, ...]
    target: str
    """host:port that answers once it serves"""
    model: str = ""
    """The model of a catalog that it belongs to"""

    @property
    def title(self) -> str:
        """What people know it by."""
        return f"{self.name} of {self.model}" if self.model else self.name


@dataclass(frozen=True, slots=True)
class CatalogPlan:
    """What a catalog asks for."""

    models: tuple[CatalogModel, ...]
    """As in the file, with the targets of what is started here"""
    services: Mapping[Checkpoint, tuple[Service, ...]]
    """A tokenizer, an engine and a grammar service for each checkpoint"""


def plan(layout: Layout) -> tuple[Service, ...]:
    """The services of one model in the order of the pipeline, left to right. Raises ServeError."""
    # with keys gRPC, which asks for none, is not for everybody
    host = "127.0.0.1" if layout.keys is not None and not layout.open else layout.host
    ports = (layout.tokenizer_port, layout.engine_port, layout.grammar_port)
    model = CatalogModel(id="", path=layout.model)
    backend = _backend(layout, model, host, ports)
    return (_shim(layout, "--tokenizer", backend[0].target), *backend)


def plan_catalog(layout: Layout, current: CatalogPlan | None = None) -> CatalogPlan:
    """Reads the catalog. What the current plan runs stays where it is. Raises ServeError."""
    assert layout.catalog is not None
    try:
        rows = read_catalog(layout.catalog)
    except CatalogError as error:
        raise ServeError(str(error)) from None
    running = {} if current is None else current.services
    services: dict[Checkpoint, tuple[Service, ...]] = {}
    taken: set[int] = {layout.port}
    models = []
    for model in rows:
        if model.path is not None:
            key = (model.path, model.dtype, model.engine_args)
            if key not in services:
                services[key] = running.get(key) or _backend(
                    layout, model, "127.0.0.1", _free_ports(layout, taken)
                )
            model = replace(model, target=services[key][0].target, path=None)
        models.append(model)
    return CatalogPlan(tuple(models), services)


def shim_of_catalog(layout: Layout, resolved: Path) -> Service:
    """The shim of a catalog that has all targets. Raises ServeError."""
    return _shim(layout, "--catalog", str(resolved))


def _shim(layout: Layout, *models: str) -> Service:
    closed = why_closed(layout.host, has_keys=layout.keys is not None, is_open=layout.open)
    if closed is not None:
        raise ServeError(closed)
    listen = ("--host", layout.host, "--port", str(layout.port))
    keys = () if layout.keys is None else ("--keys", str(layout.keys.absolute()))
    beyond = ("--open",) if layout.open else ()
    pages = ("--cors-origins", layout.cors_origins) if layout.cors_origins else ()
    hosts = ("--allowed-hosts", layout.allowed_hosts) if layout.allowed_hosts else ()
    arguments = (*listen, *models, *_grace(layout), *keys, *beyond, *pages, *hosts)
    return Service("http_shim", arguments, address(reachable(layout.host), layout.port))


def _backend(
    layout: Layout, model: CatalogModel, host: str, ports: _Ports
) -> tuple[Service, Service, Service]:
    """The services of a checkpoint, left to right."""
    checkpoint = ("--model", str(_checkpoint(model.path)))
    name = model.id or layout.model_id
    named = ("--model-id", name) if name else ()
    engine_args = [*_engine_args(layout.engine_args), *_engine_args(model.engine_args)]
    dtype = layout.dtype if model.dtype == "auto" else model.dtype
    near, (at_tokenizer, at_engine, at_grammar) = reachable(host), ports
    tokenizer, engine = address(near, at_tokenizer), address(near, at_engine)
    grammar = f"127.0.0.1:{at_grammar}"  # it is nobody's way in

    def service(name: str, host: str, port: int, target: str, *further: str) -> Service:
        listen = ("--host", host, "--port", str(port), *_grace(layout))
        return Service(name, (*listen, *checkpoint, *further), target, model.full_name)

    beyond = ("--dtype", dtype, "--grammar", grammar, *engine_args)
    return (
        service("tokenizer", host, at_tokenizer, tokenizer, *named, "--engine", engine),
        service("engine", host, at_engine, engine, *named, *beyond),
        service("grammar", "127.0.0.1", at_grammar, grammar),
    )


def _engine_args(text: str) -> list[str]:
    """Further flags of the engine. Raises ServeError."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise ServeError(f"Can't read the engine's arguments: {error}.") from None
    for argument in arguments:
        if argument.partition("=")[0] in _OURS:
            raise ServeError(
                f"The engine's arguments can't have {argument}: `tokenwire serve` sets it itself."
            )
    return arguments


def _grace(layout: Layout) -> tuple[str, str]:
    return "--grace", f"{layout.grace:g}"


def _checkpoint(model: Path | None) -> Path:
    """The directory to serve; ServeError when it holds no checkpoint."""
    if model is not None:
        if not model.is_dir():
            raise ServeError(f"The model directory {model} does not exist.")
        try:
            has_config = (model / "config.json").is_file()
        except PermissionError:
            raise ServeError(f"The model directory {model} may not be read.") from None
        if not has_config:
            raise ServeError(f"The model directory {model} holds no config.json.")
        return model.resolve()
    return embedded_checkpoint()


def embedded_checkpoint() -> Path:
    """The checkpoint that comes with the repository; ServeError without it."""
    found = sorted(path.parent for path in _CHECKPOINTS.glob("*/config.json"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ServeError(f"{_CHECKPOINTS} must hold one checkpoint, not {names}; use --model.")
    return found[0]


def require_free_ports(layout: Layout) -> None:
    """ServeError for the first port that something else listens on, or that is used twice."""
    taken: dict[int, str] = {}
    for name, host, port in _fixed_ports(layout):
        _require_port(name, port)
        if port in taken:
            raise ServeError(f"The {taken[port]} port and the {name} port are both {port}.")
        taken[port] = name
        why = why_unusable(host, port)
        if why is not None:
            raise ServeError(f"Can't use the {name} port {address(host, port)}: {why}.")


def _require_port(name: str, port: int) -> None:
    if not 1 <= port <= _LAST_PORT:
        raise ServeError(f"The {name} port must be between 1 and {_LAST_PORT}, not {port}.")


def _fixed_ports(layout: Layout) -> Iterator[tuple[str, str, int]]:
    yield "HTTP", layout.host, layout.port
    if layout.catalog is not None:
        return
    grpc_ports = (
        ("tokenizer", layout.host, layout.tokenizer_port),
        ("engine", layout.host, layout.engine_port),
        ("grammar", "127.0.0.1", layout.grammar_port),
    )
    yield from grpc_ports
    for name, host, port in grpc_ports:
        yield f"{name} metrics", host, port + _METRICS_OFFSET


def _free_ports(layout: Layout, taken: set[int]) -> _Ports:
    """Three ports of loopback that are free, as are those of their metrics; taken from now on."""
    found: list[int] = []
    for port in range(layout.tokenizer_port, _LAST_PORT - _METRICS_OFFSET):
        both = {port, port + _METRICS_OFFSET}
        if not both & taken and not any(why_unusable("127.0.0.1", each) for each in both):
            taken |= both
            found.append(port)
            if len(found) == 3:
                return found[0], found[1], found[2]
    raise ServeError(f"There are no free ports from {layout.tokenizer_port} on.")
