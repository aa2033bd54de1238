"""Announcements of `tokenwire serve` about the services that it runs."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.common.model_files.checkpoint_folder import served_name
from tokenwire.serving.running_servers import (
    STARTED_BY,
    RunningServer,
    boot_id,
    process_start,
    register,
)
from tokenwire.serving.serve_options import ServeOptions
from tokenwire.serving.service import Service, tokenizer_targets
from tokenwire.serving.service_log import report
from tokenwire.serving.stack_layout import CatalogPlan, embedded_checkpoint
from tokenwire.serving.state_folder import note_use

__all__ = ["note_server", "note_uses", "print_models", "print_shims", "report_next_command"]

_MOST_PRINTED = 20
"""Most models that are printed"""


def note_uses(services: Iterable[Service]) -> None:
    """Note for `tokenwire list` that the services' models are in use."""
    for service in services:
        if service.name == "engine":
            note_use(Path(service.checkpoint))


def note_server(
    options: ServeOptions,
    services: Sequence[Service],
    plan: CatalogPlan | None,
    *,
    has_manager: bool,
) -> None:
    """Note this server for `tokenwire run`, `ps` and `stop` of the same user.

    plan: of the catalog; None = the server has one model. has_manager: whether it has models on
    demand.
    """
    pid = os.getpid()
    server = RunningServer(
        pid=pid,
        start=process_start(pid) or 0,
        boot=boot_id(),
        url=options.url,
        jobs=next((each.target for each in services if each.name == "jobs"), ""),
        manager=options.manager_target if has_manager else "",
        targets=_targets(options, services, plan),
        since=time.time(),
        is_background=os.environ.get(STARTED_BY) == "run",
        has_keys=options.keys is not None,
    )
    try:
        register(server)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        report(f"`tokenwire ps` can't show this server: {error}")


def _targets(
    options: ServeOptions, services: Sequence[Service], plan: CatalogPlan | None
) -> dict[str, str]:
    """Return a tokenizer service of each model that is always loaded, by its names."""
    if plan is None:
        name = options.model_id or served_name(options.model or embedded_checkpoint())
        return {name: next(each.target for each in services if each.name == "tokenizer")}
    return {
        name: row.target.partition(",")[0]
        for row in plan.models
        if row.target and not row.on_demand
        for name in row.names
    }


def report_next_command() -> None:
    """Say what the embedded model is for, and how to serve one that can talk."""
    by_make = os.environ.get(STARTED_BY) == "make"
    command = "make serve MODEL=smollm2" if by_make else "tokenwire serve smollm2"
    report(
        "this is the embedded model of 6 million parameters: it shows the machinery, and can't "
        f"talk. `{command}` serves one that can: 271 MB, Apache-2.0."
    )


def print_shims(services: Iterable[Service]) -> None:
    """Print where the metrics of several shims are; one alone serves them at the HTTP port."""
    shims = [service for service in services if service.name == "http_shim"]
    if len(shims) > 1:
        print(
            f"  metrics of {len(shims)} shims: {', '.join(each.health_url for each in shims)}",
            flush=True,
        )


def print_models(plan: CatalogPlan) -> None:
    """Print the targets of each model."""
    backends = {tokenizer_targets(services): services for services in plan.services.values()}
    for model in plan.models[:_MOST_PRINTED]:
        services = backends.get(model.target or "")
        if services is not None and services[0].on_demand:
            where = "on demand"
        elif services is not None:
            where = ", ".join(f"{each.name} {each.target}" for each in services)
        else:
            where = f"tokenizer {model.target}" if model.target else "not served"
        print(f"  {model.full_name}: {where}", flush=True)
    if (more := len(plan.models) - _MOST_PRINTED) > 0:
        print(f"  … and {more} more", flush=True)
