"""Services that `tokenwire serve` runs, and their ports.

One model has five services, or more with several engines. A catalog has one shim and one jobs
service, and a tokenizer, engines and a grammar service for each checkpoint.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from services.common.model_files.catalog_file import (
    NO_TOKEN,
    CatalogError,
    CatalogModel,
    read_catalog,
)
from services.common.model_files.checkpoint_folder import (
    CheckpointFolderError,
    require_config,
    require_readable,
    served_name,
)
from services.common.model_files.hub import HubCheckpoint, HubError
from services.common.model_files.keep_alive import DEFAULT_KEEP_ALIVE
from services.common.network.addresses import (
    LAST_PORT,
    METRICS_PORT_OFFSET,
    address,
    is_loopback,
    reachable,
    why_closed,
    why_unusable,
)
from tokenwire.serving.model_folders import models_in
from tokenwire.serving.service_flags import FlagError, engine_arguments, split_flags

__all__ = [
    "CatalogPlan",
    "LogPlace",
    "ServeError",
    "ServeOptions",
    "Service",
    "edge_of_catalog",
    "embedded_checkpoint",
    "engine_flags",
    "hub_checkpoints",
    "plan",
    "plan_catalog",
    "require_free_ports",
]


_LONGEST_GRACE = 2**31 - 1
"""Largest --grace in seconds, the same as that of the services"""
_REPLICA_PORTS = 10
"""Distance between the ports of a model's engines"""
_MOST_REPLICAS = 64
Checkpoint: TypeAlias = tuple[Path, str, str, int, Path | None, bool, tuple[tuple[str, Path], ...]]
"""Directory, dtype, engine's flags, replicas, chat template, whether on demand, and adapters"""
_LEAST_CACHE, _MOST_CACHE = 256 * 2**20, 4 * 2**30
"""Bytes of the KV cache of a model on demand"""
_CACHE_SHARE = 8
"""Part of --memory that the KV cache of a model on demand takes, within these bounds"""
_INSTALLED = Path(__file__).resolve().parents[1] / "models"
_CHECKPOINTS = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "models"
"""Folder of the embedded checkpoint: within an installed package, else in the checkout"""


class ServeError(Exception):
    """Stack that can't start (`exit_code` 2) or can't continue (1). The message is one sentence."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `tokenwire serve`. Raises ServeError for numbers out of range."""

    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer_port: int = 50051
    engine_port: int = 50052
    grammar_port: int = 50053
    jobs_port: int = 50054
    no_jobs: bool = False
    """Start no jobs service: files, batches, kept responses and PDFs are then refused"""
    model: Path | None = None
    """Directory of a checkpoint, or GGUF file; None = the embedded one"""
    model_id: str = ""
    """Name under which the model is served; empty = the directory's name"""
    chat_template: Path | None = None
    """File (Jinja) of the model's default chat template; None = the checkpoint's"""
    models: tuple[Path, ...] | None = None
    """Folders whose models are loaded when requests name them; None = none"""
    memory: int = 0
    """Bytes that the models on demand may take together; 0 = a share of what is free"""
    max_loaded: int = 64
    """Models on demand in memory, at most"""
    keep_alive: float = DEFAULT_KEEP_ALIVE
    """Seconds that a model on demand stays in memory after its last use; infinity = for ever"""
    load_timeout: float = 600.0
    """Longest wait of a request for the load of its model, in seconds"""
    manager_port: int = 50055
    packed_size: int = 16 * 2**30
    """Bytes of the packed weights of models on demand that are kept on the disk; 0 = none"""
    packed_cache: Path | None = None
    """Folder of these weights; None = they are not kept"""
    no_spare: bool = False
    """Prepare no processes for the next model on demand"""
    catalog: Path | None = None
    """Models to serve instead; their services get free ports from `tokenizer_port` upwards"""
    keys: Path | None = None
    """API keys of HTTP and gRPC; with them, gRPC is served beyond loopback only with `plaintext`"""
    peer_token_file: Path | None = None
    """Token that the services show each other; None = none, or with keys one of their own"""
    limits_url: str = ""
    """Redis that counts the limits of keys for several servers; empty = this one counts alone"""
    plaintext: bool = False
    """Serve gRPC beyond loopback although keys then cross the network in clear text"""
    dtype: str = "auto"
    engine_args: str = ""
    """Additional engine flags, quoted as in a shell"""
    service_flags: tuple[str, ...] = ()
    """Further flags; each service gets those that it has"""
    replicas: int = 1
    """Engines of the model; a row of a catalog has its own number"""
    no_restart: bool = False
    """Stop the stack when one of its services ends, instead of starting that one again"""
    open: bool = False
    """Allow a host beyond loopback without API keys"""
    cors_origins: str = ""
    """Origins whose web pages may use the API, separated by commas; "*" = all"""
    allowed_hosts: str = ""
    """Host names that HTTP requests may use besides those of loopback, separated by commas"""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """Certificate and key of the HTTP server (PEM); None = plain HTTP"""
    grace: float = 30.0
    """Seconds that running requests may take when the stack stops"""
    otlp_endpoint: str = ""
    """URL of the OTLP collector that the services send traces to; empty = standard variables"""
    log_format: str = "auto"
    """Form of the log lines on stderr: json, text, or auto = text on a terminal"""
    log_dir: Path | None = None
    """Directory of a log file per service; None = stderr"""
    log_size: int = 64 * 2**20
    """Bytes at which a log file is full and a new one begins; 0 = no limit"""

    @property
    def scheme(self) -> str:
        """Scheme of the HTTP server's URL."""
        return "http" if self.tls_cert is None else "https"

    @property
    def serves_catalog(self) -> bool:
        """True if the server may have several models."""
        return self.catalog is not None or self.models is not None

    @property
    def manager_target(self) -> str:
        """Address of the manager of models on demand; only services of this machine call it."""
        return f"127.0.0.1:{self.manager_port}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache of a model on demand."""
        return min(max(self.memory // _CACHE_SHARE, _LEAST_CACHE), _MOST_CACHE)

    @property
    def logs(self) -> "LogPlace | None":
        """Folder and size of the log files; None = the services log to stderr."""
        return None if self.log_dir is None else LogPlace(self.log_dir, self.log_size)

    def __post_init__(self) -> None:
        _require_port("--port", self.port)
        _require_port("--tokenizer-port", self.tokenizer_port)
        _require_port("--engine-port", self.engine_port)
        _require_port("--grammar-port", self.grammar_port)
        _require_port("--jobs-port", self.jobs_port)
        _require_port("--manager-port", self.manager_port)
        if self.max_loaded < 1:
            raise ServeError(f"--max-loaded must be at least 1, not {self.max_loaded}.")
        if not 1 <= self.load_timeout <= _LONGEST_GRACE:
            raise ServeError(f"--load-timeout must be at least 1, not {self.load_timeout:g}.")
        if not 0 <= self.grace <= _LONGEST_GRACE:
            raise ServeError(f"--grace must be between 0 and {_LONGEST_GRACE}, not {self.grace}.")
        if not 1 <= self.replicas <= _MOST_REPLICAS:
            message = f"--replicas must be between 1 and {_MOST_REPLICAS}, not {self.replicas}."
            raise ServeError(message)


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Folder of log files, and the size in bytes at which one is full (0 = no limit)."""

    folder: Path
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Service:
    """One process: `python -m services.NAME ARGUMENTS`."""

    name: str
    arguments: tuple[str, ...]
    target: str
    """host:port at which the service answers"""
    model: str = ""
    """Catalog model that it serves; empty without a catalog"""
    replica: int = 1
    """Number of the engine among those of its model"""
    on_demand: bool = False
    """True if it runs only while requests use its model"""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the process gets besides those of `tokenwire serve`"""

    @property
    def checkpoint(self) -> str:
        """Path of the model's directory or file; empty for a service without a model."""
        flags = self.arguments
        return flags[flags.index("--model") + 1] if "--model" in flags else ""

    @property
    def title(self) -> str:
        """Name in messages: "engine", "engine 2", or "engine of MODEL" with a catalog."""
        name = f"{self.name} {self.replica}" if self.replica > 1 else self.name
        return f"{name} of {self.model}" if self.model else name

    @property
    def log_name(self) -> str:
        """Name of its log file, without the suffix."""
        replica = str(self.replica) if self.replica > 1 else ""
        name = "-".join(part for part in (self.name, replica, self.model) if part)
        return re.sub(r"[^A-Za-z0-9._-]", "-", name)


@dataclass(frozen=True, slots=True)
class _Ports:
    """gRPC ports of a model's services."""

    tokenizer: int
    engines: Sequence[int]
    grammar: int


@dataclass(frozen=True, slots=True)
class CatalogPlan:
    """Models of a catalog, and the services that they need."""

    models: tuple[CatalogModel, ...]
    """Models in the file's order, with the targets of the services started here"""
    services: Mapping[Checkpoint, tuple[Service, ...]]
    """Tokenizer, engines and grammar service of each checkpoint"""
    first: str = ""
    """Full name of the model on demand that is loaded at the start; empty = none"""


def plan(options: ServeOptions) -> tuple[Service, ...]:
    """Return the services of one model in pipeline order, shim first. Raises ServeError."""
    host = _grpc_host(options)
    ports = _Ports(options.tokenizer_port, _engine_ports(options), options.grammar_port)
    model = CatalogModel(id="", path=options.model, replicas=options.replicas)
    backend = _backend(options, model, host, ports, _memory_share(options.replicas, 50))
    return (*_edge(options, "--tokenizer", backend[0].target), *backend)


def plan_catalog(options: ServeOptions, current: CatalogPlan | None = None) -> CatalogPlan:
    """Read catalog and folders. Services of `current` keep their ports. Raises ServeError."""
    rows, first = _rows(options)
    running = {} if current is None else current.services
    services: dict[Checkpoint, tuple[Service, ...]] = {}
    taken = _taken_ports(options, running)
    models = []
    keys = {_checkpoint_of(row): row for row in rows}
    engines = sum(row.replicas for key, row in keys.items() if key and not row.on_demand)
    halved = any(row.on_demand for row in rows)
    for model in rows:
        if (key := _checkpoint_of(model)) is not None:
            if key not in services:
                services[key] = running.get(key) or _backend(
                    options,
                    model,
                    "127.0.0.1",
                    _free_ports(options, taken, model.replicas),
                    _memory_flags(options, model, engines, halved=halved),
                )
            token = options.peer_token_file
            target = services[key][0].target
            model = replace(model, target=target, path=None, peer_token_file=token)
        elif model.on_demand and not model.adapter_of:
            raise ServeError(f"{model.full_name} has on_demand = true, which needs a path.")
        elif model.target is not None and model.peer_token_file is None:
            model = replace(model, peer_token_file=NO_TOKEN)  # it is of another installation
        models.append(model)
    targets = {model.id: model.target for model in models if not model.variant}
    return CatalogPlan(
        tuple(
            replace(model, target=targets[model.adapter_of], path=None)
            if model.adapter_of
            else model
            for model in models
        ),
        services,
        first,
    )


def _rows(options: ServeOptions) -> tuple[list[CatalogModel], str]:
    """Return the rows of catalog and folders, and the name of the one to load at the start."""
    try:
        rows = [] if options.catalog is None else [*read_catalog(options.catalog)]
    except CatalogError as error:
        raise ServeError(str(error)) from None
    if options.models is None:
        return rows, ""
    first = ""
    found = models_in(options.models)
    if options.model is not None:
        path = options.model.absolute()
        first = options.model_id or served_name(path)
        found = [each for each in found if each.path != path and each.id != first]
        found.insert(0, CatalogModel(id=first, names=(first,), path=path, on_demand=True))
    taken = {name for row in rows for name in row.names} | {row.id for row in found}
    for row in found:
        if not any(row.id in each.names for each in rows):
            others = [name for name in row.names if name not in taken]
            taken.update(others)
            rows.append(replace(row, names=(row.id, *others)))
    return rows, first


def _taken_ports(
    options: ServeOptions, running: Mapping[Checkpoint, Sequence[Service]]
) -> set[int]:
    """Return the ports that services of the server have, or get when they are loaded."""
    ports = {options.port, options.jobs_port, options.manager_port}
    ports |= {
        int(each.target.rpartition(":")[2]) for services in running.values() for each in services
    }
    return ports | {port + METRICS_PORT_OFFSET for port in ports}


def _checkpoint_of(model: CatalogModel) -> Checkpoint | None:
    """Return the checkpoint whose services are started for a model; None if there is none."""
    if model.path is None or model.adapter_of:
        return None
    flags = (model.dtype, model.engine_args, model.replicas, model.chat_template, model.on_demand)
    return (model.path, *flags, model.adapters)


def _memory_flags(
    options: ServeOptions, model: CatalogModel, num_engines: int, *, halved: bool
) -> tuple[str, ...]:
    """Return the flags of a model's engines that concern memory.

    num_engines: engines of all checkpoints that are not on demand; they share half of the free
    memory, or a quarter if `halved`, because models on demand take memory too.
    """
    if model.on_demand:
        return ("--kv-memory", str(options.cache_bytes), *_packed_cache(options, model))
    return _memory_share(num_engines, 25 if halved else 50)


def hub_checkpoints(options: ServeOptions) -> Mapping[HubCheckpoint, tuple[str, ...]]:
    """Return the catalog's checkpoints of a hub, each with its engine's flags.

    Raises ServeError.
    """
    try:
        rows = () if options.catalog is None else read_catalog(options.catalog)
        return {
            HubCheckpoint.parse(str(row.path)): _engine_flags(options, row)
            for row in rows
            if row.path is not None and HubCheckpoint.is_named_by(str(row.path))
        }
    except (CatalogError, HubError) as error:
        raise ServeError(str(error)) from None


def engine_flags(options: ServeOptions) -> tuple[str, ...]:
    """Return the flags of the engines of the only model. Raises ServeError."""
    return _engine_flags(options, CatalogModel(id=""))


def edge_of_catalog(
    options: ServeOptions, resolved: Path, *, has_manager: bool = False
) -> tuple[Service, ...]:
    """Return shim and jobs of a catalog file that has all targets. Raises ServeError.

    has_manager: whether models may be on demand.
    """
    manager = ("--model-manager", options.manager_target) if has_manager else ()
    return _edge(options, "--catalog", str(resolved), *manager)


def _edge(options: ServeOptions, *models: str) -> tuple[Service, ...]:
    """Return the services that have all models: the shim, and the jobs unless there are none."""
    if options.no_jobs:
        return (_shim(options, *models, *_peer_token(options)),)
    jobs = _jobs(options, *models)
    return (_shim(options, *models, "--jobs", jobs.target, *_peer_token(options)), jobs)


def _jobs(options: ServeOptions, *models: str) -> Service:
    host = _grpc_host(options)
    plain = () if is_loopback(host) else ("--plaintext",)
    listen = ("--host", host, "--port", str(options.jobs_port), *plain)
    keys = () if options.keys is None else ("--keys", str(options.keys.absolute()))
    own = (*_usage_store(options), *_flags_of(options, "jobs"))
    arguments = (*listen, *models, *_common(options), *keys, *_peer_token(options), *own)
    return Service("jobs", arguments, _jobs_target(options), environment=_limits(options, "jobs"))


def _usage_store(options: ServeOptions) -> tuple[str, ...]:
    """Return the flag that keeps usage beside the keys, whose budgets then survive a restart."""
    if options.keys is None or not os.access(options.keys.absolute().parent, os.W_OK):
        return ()
    return ("--usage-store", str(options.keys.absolute().with_suffix(".usage.sqlite")))


def _shim(options: ServeOptions, *models: str) -> Service:
    closed = why_closed(options.host, has_keys=options.keys is not None, is_open=options.open)
    if closed is not None:
        raise ServeError(closed)
    listen = ("--host", options.host, "--port", str(options.port))
    keys = () if options.keys is None else ("--keys", str(options.keys.absolute()))
    beyond = ("--open",) if options.open else ()
    pages = ("--cors-origins", options.cors_origins) if options.cors_origins else ()
    hosts = ("--allowed-hosts", options.allowed_hosts) if options.allowed_hosts else ()
    tls = [
        *(() if options.tls_cert is None else ("--tls-cert", str(options.tls_cert))),
        *(() if options.tls_key is None else ("--tls-key", str(options.tls_key))),
    ]
    own = _flags_of(options, "http_shim")
    arguments = (*listen, *models, *_common(options), *keys, *beyond, *pages, *hosts, *tls, *own)
    target = address(reachable(options.host), options.port)
    return Service("http_shim", arguments, target, environment=_limits(options, "http_shim"))


def _grpc_host(options: ServeOptions) -> str:
    """Return the address of the tokenizer service and the engines."""
    # API keys in clear text, which a proxy may keep from HTTP, need consent of their own
    is_allowed = options.keys is None or options.open or options.plaintext
    return options.host if is_allowed else "127.0.0.1"


def _peer_token(options: ServeOptions) -> tuple[str, ...]:
    token = options.peer_token_file
    return () if token is None else ("--peer-token-file", str(token.absolute()))


def _chat_template(options: ServeOptions, model: CatalogModel) -> tuple[str, ...]:
    file = model.chat_template or options.chat_template
    return () if file is None else ("--chat-template", str(file.absolute()))


def _limits(options: ServeOptions, service: str) -> tuple[tuple[str, str], ...]:
    """Return the variable with the URL of Redis, whose password must not be seen in `ps`."""
    url = options.limits_url
    return ((f"TOKENWIRE_{service.upper()}_LIMITS_URL", url),) if url else ()


def _backend(
    options: ServeOptions,
    model: CatalogModel,
    host: str,
    ports: _Ports,
    memory: tuple[str, ...],
) -> tuple[Service, ...]:
    """Return the services of a checkpoint in pipeline order.

    memory: flags of the engines that concern memory, which others may replace.
    """
    checkpoint = ("--model", str(_checkpoint(model.path)))
    name = model.id or options.model_id
    named = ("--model-id", name) if name else ()
    flags = _engine_flags(options, model)
    near = reachable(host)
    engines = [address(near, port) for port in ports.engines]
    grammar = f"127.0.0.1:{ports.grammar}"  # only the engines call it

    def service(name: str, host: str, port: int, *further: str) -> Service:
        plain = () if is_loopback(host) else ("--plaintext",)
        common = (*_common(options), *_peer_token(options))
        listen = ("--host", host, "--port", str(port), *plain, *common)
        own = () if name == "engine" else _flags_of(options, name)
        arguments = (*listen, *checkpoint, *named, *further, *own)
        target = address(reachable(host), port)
        return Service(name, arguments, target, model.full_name, on_demand=model.on_demand)

    keys = (
        ()
        if options.keys is None
        else ("--keys", str(options.keys.absolute()), *_usage_of_keys(options))
    )
    adapters = ",".join(f"{name}={path}" for name, path in model.adapters)
    if adapters and "--adapters" in {argument.partition("=")[0] for argument in flags}:
        message = f"{model.id} has adapters in the catalog; its engine's arguments can't have more."
        raise ServeError(message)
    loaded = ("--adapters", adapters) if adapters else ()
    beyond = ("--grammar", grammar, *keys, *loaded, *memory, *flags)
    return (
        replace(
            service(
                "tokenizer",
                host,
                ports.tokenizer,
                *("--engine", ",".join(engines), *keys, *_chat_template(options, model)),
            ),
            environment=_limits(options, "tokenizer"),
        ),
        *(
            replace(
                service("engine", host, port, *beyond),
                replica=number + 1,
                environment=_share(number, len(engines)),
            )
            for number, port in enumerate(ports.engines)
        ),
        service("grammar", "127.0.0.1", ports.grammar),
    )


def _usage_of_keys(options: ServeOptions) -> tuple[str, ...]:
    """Return the flag of services that report the usage of keys."""
    return () if options.no_jobs else ("--jobs", _jobs_target(options))


def _jobs_target(options: ServeOptions) -> str:
    return address(reachable(_grpc_host(options)), options.jobs_port)


def _share(number: int, replicas: int) -> tuple[tuple[str, str], ...]:
    """Return the variables that give an engine its share of the machine: a GPU, or cores."""
    if replicas == 1:
        return ()
    gpus = _count_gpus()
    if gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return (("CUDA_VISIBLE_DEVICES", str(number % gpus)),)
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return (("OMP_NUM_THREADS", str(max(1, (cores or 1) // replicas))),)
    return ()


def _engine_flags(options: ServeOptions, model: CatalogModel) -> tuple[str, ...]:
    """Return the flags of a model's engines; later ones take precedence. Raises ServeError."""
    dtype = options.dtype if model.dtype == "auto" else model.dtype
    try:
        stated = (engine_arguments(options.engine_args), engine_arguments(model.engine_args))
    except FlagError as error:
        raise ServeError(str(error)) from None
    own = _flags_of(options, "engine")
    return ("--dtype", dtype, *own, *(flag for flags in stated for flag in flags))


def _flags_of(options: ServeOptions, service: str) -> tuple[str, ...]:
    """Return the service's part of the flags that are handed on. Raises ServeError."""
    try:
        return split_flags(options.service_flags)[service]
    except FlagError as error:
        raise ServeError(str(error)) from None


def _packed_cache(options: ServeOptions, model: CatalogModel) -> tuple[str, ...]:
    """Return the flag by which engines of a model on demand keep their packed weights."""
    stated = _engine_flags(options, model)
    is_packed = "mapped" not in stated and "--weights=mapped" not in stated
    if options.packed_cache is None or not is_packed or _count_gpus():
        return ()
    return ("--packed-cache", str(options.packed_cache))


def _memory_share(num_engines: int, percent: int) -> tuple[str, ...]:
    """Return the flag that divides a share of the free memory among the KV caches of engines."""
    if (num_engines == 1 and percent == 50) or _count_gpus():
        return ()
    return ("--kv-memory", f"{max(percent / num_engines, 1):.3g}%")


def _count_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _common(options: ServeOptions) -> tuple[str, ...]:
    """Return the flags of all services."""
    traces = ("--otlp-endpoint", options.otlp_endpoint) if options.otlp_endpoint else ()
    # the supervisor reads the lines, and turns them into text where people read them
    return ("--grace", f"{options.grace:g}", "--log-format", "json", *traces)


def _checkpoint(model: Path | None) -> Path:
    """Return the directory to serve. Raises ServeError if it holds no checkpoint."""
    if model is None:
        return embedded_checkpoint()
    try:
        if HubCheckpoint.is_named_by(str(model)):
            model = HubCheckpoint.parse(str(model)).cached()
        require_readable(model)
        require_config(model)
    except (CheckpointFolderError, HubError) as error:
        raise ServeError(str(error)) from None
    return model.resolve() if model.is_dir() else model.absolute()  # a link has the file's name


def embedded_checkpoint() -> Path:
    """Return the checkpoint that comes with the repository. Raises ServeError without it."""
    found = sorted(path.parent for path in _CHECKPOINTS.glob("*/config.json"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ServeError(f"{_CHECKPOINTS} must hold one checkpoint, not {names}; use --model.")
    return found[0]


def require_free_ports(options: ServeOptions) -> None:
    """Raise ServeError for the first port that is in use or named twice."""
    taken: dict[int, str] = {}
    for name, host, port in _fixed_ports(options):
        _require_port(f"The {name} port", port)
        if port in taken:
            raise ServeError(f"The {taken[port]} port and the {name} port are both {port}.")
        taken[port] = name
        why = why_unusable(host, port)
        if why is not None:
            raise ServeError(f"Can't use the {name} port {address(host, port)}: {why}.")


def _require_port(name: str, port: int) -> None:
    if not 1 <= port <= LAST_PORT:
        raise ServeError(f"{name} must be between 1 and {LAST_PORT}, not {port}.")


def _fixed_ports(options: ServeOptions) -> Iterator[tuple[str, str, int]]:
    yield "HTTP", options.host, options.port
    host = _grpc_host(options)
    if not options.no_jobs:
        yield "jobs", host, options.jobs_port
        yield "jobs metrics", host, options.jobs_port + METRICS_PORT_OFFSET
    if options.models is not None:
        yield "manager", "127.0.0.1", options.manager_port
        yield "manager metrics", "127.0.0.1", options.manager_port + METRICS_PORT_OFFSET
    if options.serves_catalog:
        return
    grpc_ports = (
        ("tokenizer", host, options.tokenizer_port),
        *(("engine", host, port) for port in _engine_ports(options)),
        ("grammar", "127.0.0.1", options.grammar_port),
    )
    yield from grpc_ports
    for name, host, port in grpc_ports:
        yield f"{name} metrics", host, port + METRICS_PORT_OFFSET


def _engine_ports(options: ServeOptions) -> list[int]:
    return [options.engine_port + _REPLICA_PORTS * number for number in range(options.replicas)]


def _free_ports(options: ServeOptions, taken: set[int], replicas: int) -> _Ports:
    """Take loopback ports that are free together with their metrics ports."""
    found: list[int] = []
    for port in range(options.tokenizer_port, LAST_PORT - METRICS_PORT_OFFSET):
        both = {port, port + METRICS_PORT_OFFSET}
        if not both & taken and not any(why_unusable("127.0.0.1", each) for each in both):
            taken |= both
            found.append(port)
            if len(found) == 2 + replicas:
                return _Ports(found[0], found[1:-1], found[-1])
    raise ServeError(f"There are no free ports from {options.tokenizer_port} upwards.")
