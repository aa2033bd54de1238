"""Models that are loaded on demand: their plans, their states, and the leases of their users."""

import asyncio
import time
from dataclasses import dataclass

from tokenwire.errors import ServiceError
from tokenwire.pb.models.v1 import model_manager_pb2 as pb
from tokenwire.serving.service import Service
from tokenwire.serving.stack_layout import CatalogPlan

__all__ = ["ManagedModel", "ModelLease", "OnDemandModel", "has_on_demand", "on_demand_models"]

_STATES_IN_MEMORY = (pb.MODEL_STATE_LOADING, pb.MODEL_STATE_LOADED)


@dataclass(frozen=True, slots=True)
class OnDemandModel:
    """A model of the catalog that is loaded on demand."""

    name: str
    """Full name, id or id:variant"""
    aliases: tuple[str, ...]
    """Further names by which requests may choose it"""
    services: tuple[Service, ...]
    """Tokenizer, engines and grammar service"""
    keep_alive: float
    """Seconds that it stays in memory after its last use; infinity = for ever"""

    def without_path(self, text: str) -> str:
        """Return a text in which the model's name replaces its path."""
        path = self.services[0].checkpoint
        return text.replace(path, self.name) if path else text


def has_on_demand(plan: CatalogPlan) -> bool:
    """Return whether a catalog has a model on demand."""
    return any(services[0].on_demand for services in plan.services.values())


def on_demand_models(plan: CatalogPlan, keep_alive: float) -> list[OnDemandModel]:
    """Return the models on demand of a catalog; rows that share services are one model.

    keep_alive: seconds of rows that state none.
    """
    models = []
    for services in plan.services.values():
        if services[0].on_demand:
            target = services[0].target
            rows = [row for row in plan.models if row.target == target and not row.adapter_of]
            names = [name for row in rows for name in (row.full_name, *row.names)]
            first, *aliases = dict.fromkeys(names)
            stated = [row.keep_alive for row in rows if row.keep_alive is not None]
            seconds = max(stated, default=keep_alive)
            models.append(OnDemandModel(first, tuple(aliases), services, seconds))
    return models


class ModelLease:
    """One user of a model: the model stays in memory from `grant` to the end of the lease."""

    def __init__(self, model: "ManagedModel") -> None:
        self.model = model
        self.events: asyncio.Queue[pb.UseModelResponse] = asyncio.Queue()
        """Events for the user, in order; few, since only changes are sent"""
        self.timer: asyncio.TimerHandle | None = None
        """Limit on the wait for the model"""
        self.has_failed = False
        self._is_wanted = False
        self._position = -1

    def grant(self) -> None:
        """Tell the user that the model is in memory."""
        self._end_wait()
        self.events.put_nowait(pb.UseModelResponse(ready=pb.Ready()))

    def fail(self, error: ServiceError) -> None:
        """End the lease with an error."""
        self._end_wait()
        self.has_failed = True
        self.events.put_nowait(pb.UseModelResponse(failed=error.to_status()))

    def want(self) -> None:
        """Ask the user to end the lease soon, once."""
        if not self._is_wanted:
            self._is_wanted = True
            self.events.put_nowait(pb.UseModelResponse(wanted=pb.Wanted()))

    def tell_position(self, position: int) -> None:
        """Tell the user how many leases come before, if that has changed."""
        if position == self._position:
            return
        self._position = position
        self.events.put_nowait(pb.UseModelResponse(queued=pb.Queued(position=position)))

    def tell_progress(self, progress: float | None) -> None:
        """Tell the user how much of the load is done."""
        self.events.put_nowait(pb.UseModelResponse(loading=pb.Loading(progress=progress)))

    def _end_wait(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class ManagedModel:
    """State of a model. `ModelManager` changes it."""

    def __init__(self, plan: OnDemandModel) -> None:
        self.plan = plan
        self.state: pb.ModelState.ValueType = pb.MODEL_STATE_IDLE
        self.progress: float | None = None
        self.memory_bytes: int | None = None
        self.leases: set[ModelLease] = set()
        """Leases of the loaded model"""
        self.joining: set[ModelLease] = set()
        """Leases that the running load grants"""
        self.keep_alive = plan.keep_alive
        """Seconds in force, which a user may have changed"""
        self.last_used = 0.0
        """Monotonic time"""
        self.idle_timer: asyncio.TimerHandle | None = None
        self.idle_until: float | None = None
        """Unix time"""
        self.loaded_since: float | None = None
        """Unix time"""
        self.error = ""
        self.pause = 0.0
        """Seconds between the last failure and the next try"""
        self.retry_at = 0.0
        """Monotonic time"""
        self.work: asyncio.Task[None] | None = None
        """The load or the unload that runs"""
        self.is_leaving = False
        """True while the model is unloaded"""
        self.is_gone = False
        """True for a model that the catalog no longer has"""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def in_memory(self) -> bool:
        """True if the model takes memory, or is about to."""
        return self.state in _STATES_IN_MEMORY and not self.is_leaving

    @property
    def is_loaded(self) -> bool:
        return self.state == pb.MODEL_STATE_LOADED and not self.is_leaving

    @property
    def is_used(self) -> bool:
        """True if a user has it, or gets it from the running load."""
        return bool(self.leases or self.joining)

    @property
    def retry_seconds(self) -> float:
        """Seconds until a failed model may be loaded again."""
        return max(0.0, self.retry_at - time.monotonic())

    def note_use(self) -> None:
        """Note a use at this time, so that no timer unloads the model."""
        self.last_used = time.monotonic()
        self.idle_until = None
        if self.idle_timer is not None:
            self.idle_timer.cancel()
            self.idle_timer = None

    def set_failed(self, why: str, least_pause: float, most_pause: float) -> None:
        """Note a failure, after which the pause before the next try doubles."""
        self.state, self.error, self.progress = pb.MODEL_STATE_FAILED, why, None
        self.loaded_since = None
        self.pause = min(max(2 * self.pause, least_pause), most_pause)
        self.retry_at = time.monotonic() + self.pause

    def to_message(self) -> pb.Model:
        """Return the state as the contract has it."""
        is_failed = self.state == pb.MODEL_STATE_FAILED
        return pb.Model(
            name=self.name,
            aliases=self.plan.aliases,
            state=pb.MODEL_STATE_IDLE if self.is_leaving else self.state,
            progress=self.progress,
            memory_bytes=self.memory_bytes,
            idle_until=self.idle_until,
            error=self.error if is_failed else "",
            users=len(self.leases),
            loaded_since=None if self.is_leaving else self.loaded_since,
            target=self.plan.services[0].target,
        )
