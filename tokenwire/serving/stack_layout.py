"""Services that `tokenwire serve` runs.

One model has five services, or more with several engines, tokenizer services or shims. A catalog
has shims and a jobs service, and tokenizer services, engines and a grammar service for each
checkpoint.
"""

import os
from collections.abc import Mapping
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
from services.common.network.addresses import (
    address,
    is_loopback,
    reachable,
    why_closed,
)
from tokenwire.serving.model_folders import models_in
from tokenwire.serving.serve_options import ServeError, ServeOptions
from tokenwire.serving.service import Service, tokenizer_targets
from tokenwire.serving.service_flags import FlagError, engine_arguments, split_flags
from tokenwire.serving.stack_ports import (
    ModelPorts,
    fixed_ports,
    free_ports,
    shim_metrics_port,
    taken_ports,
)

__all__ = [
    "CatalogPlan",
    "edge_of_catalog",
    "embedded_checkpoint",
    "engine_flags",
    "hub_checkpoints",
    "plan",
    "plan_catalog",
]


Checkpoint: TypeAlias = tuple[Path, str, str, int, Path | None, bool, tuple[tuple[str, Path], ...]]
"""Directory, dtype, engine's flags, replicas, chat template, whether on demand, and adapters"""
_CORES_OF_TEXT, _MOST_OF_TEXT = 4, 4
"""Cores of the machine for each tokenizer service before a GPU, and most such services"""
_INSTALLED = Path(__file__).resolve().parents[1] / "models"
_CHECKPOINTS = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "models"
"""Folder of the embedded checkpoint: within an installed package, else in the checkout"""


@dataclass(frozen=True, slots=True)
class CatalogPlan:
    """Models of a catalog, and the services that they need."""

    models: tuple[CatalogModel, ...]
    """Models in the file's order, with the targets of the services started here"""
    services: Mapping[Checkpoint, tuple[Service, ...]]
    """Tokenizer, engines and grammar service of each checkpoint"""
    first: str = ""
    """Full name of the model on demand that is loaded at the start; empty = none"""

    @property
    def lasting_services(self) -> list[Service]:
        """Services that run all the time."""
        everything = [service for services in self.services.values() for service in services]
        return [service for service in everything if not service.on_demand]


def plan(options: ServeOptions) -> tuple[Service, ...]:
    """Return the services of one model in pipeline order, shim first. Raises ServeError."""
    model = CatalogModel(id="", path=options.model, replicas=options.replicas)
    ports = fixed_ports(options, _num_tokenizers(options, model))
    memory = _memory_share(options.replicas, 50)
    backend = _backend(options, model, options.grpc_host, ports, memory)
    return (*_edge(options, "--tokenizer", tokenizer_targets(backend)), *backend)


def plan_catalog(options: ServeOptions, current: CatalogPlan | None = None) -> CatalogPlan:
    """Read catalog and folders. Services of `current` keep their ports. Raises ServeError."""
    rows, first = _rows(options)
    running = {} if current is None else current.services
    services: dict[Checkpoint, tuple[Service, ...]] = {}
    taken = taken_ports(options, (each.target for group in running.values() for each in group))
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
                    free_ports(options, taken, _num_tokenizers(options, model), model.replicas),
                    _memory_flags(options, model, engines, halved=halved),
                )
            token = options.peer_token_file
            target = tokenizer_targets(services[key])
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
    """Return shims and jobs of a catalog file that has all targets. Raises ServeError.

    has_manager: whether models may be on demand.
    """
    manager = ("--model-manager", options.manager_target) if has_manager else ()
    return _edge(options, "--catalog", str(resolved), *manager)


def _edge(options: ServeOptions, *models: str) -> tuple[Service, ...]:
    """Return the services that have all models: shims, and the jobs unless there are none."""
    if options.no_jobs:
        return _shims(options, *models, *_peer_token(options))
    jobs = _jobs(options, *models)
    return (*_shims(options, *models, "--jobs", jobs.target, *_peer_token(options)), jobs)


def _jobs(options: ServeOptions, *models: str) -> Service:
    host = options.grpc_host
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


def _shims(options: ServeOptions, *models: str) -> tuple[Service, ...]:
    """Return the shims, which share the HTTP port. Each of several has its own metrics port."""
    count = _num_shims(options)
    shim = _shim(options, *models)
    if count == 1:
        return (shim,)
    stated = int(shim.flag("--metrics-port") or 0)
    ports = [shim_metrics_port(options, stated, number) for number in range(count)]
    return tuple(
        replace(
            shim,
            arguments=(*shim.arguments, "--metrics-port", str(port)),
            replica=number,
            health_url=f"http://{address(reachable(options.host), port)}/metrics",
        )
        for number, port in enumerate(ports, start=1)
    )


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
    return Service(
        "http_shim",
        arguments,
        target,
        health_url=f"{options.scheme}://{target}/health",
        environment=_limits(options, "http_shim"),
    )


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
    ports: ModelPorts,
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
    before = ("--engine", ",".join(engines), *keys, *_chat_template(options, model))
    return (
        *(
            replace(
                service("tokenizer", host, port, *before),
                replica=number,
                environment=_limits(options, "tokenizer"),
            )
            for number, port in enumerate(ports.tokenizers, start=1)
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
    return address(reachable(options.grpc_host), options.jobs_port)


def _share(number: int, replicas: int) -> tuple[tuple[str, str], ...]:
    """Return the variables that give an engine its share of the machine: a GPU, or cores."""
    if replicas == 1:
        return ()
    gpus = _count_gpus()
    if gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return (("CUDA_VISIBLE_DEVICES", str(number % gpus)),)
    if "OMP_NUM_THREADS" not in os.environ:
        return (("OMP_NUM_THREADS", str(max(1, _count_cores() // replicas))),)
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


def _num_tokenizers(options: ServeOptions, model: CatalogModel) -> int:
    """Return the number of tokenizer services of a model."""
    return 1 if model.on_demand else options.tokenizers or _text_processes(options)


def _num_shims(options: ServeOptions) -> int:
    return options.shims or _text_processes(options)


def _text_processes(options: ServeOptions) -> int:
    """Return how many processes carry the text of the engines by default, at each of two stages.

    A process carries about 40,000 tokens/s. Only engines on a GPU make more.
    """
    if options.counts_limits_alone or not _count_gpus():
        return 1
    return min(max(_count_cores() // _CORES_OF_TEXT, 1), _MOST_OF_TEXT)


def _count_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


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
