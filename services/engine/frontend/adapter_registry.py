"""The engine's LoRA adapters by name, for its clients and its operators."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from services.common.bounds import most
from services.common.settings import StartupError
from services.engine.messages import AdapterLoaded, Command, LoadAdapter, UnloadAdapter
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.engine.v1.engine_pb2 import LoadAdapterRequest

__all__ = ["Adapter", "AdapterRegistry", "parse_adapters"]

_LOG = logging.getLogger("engine")
_MOST_CHARACTERS = most(LoadAdapterRequest, "name")
_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter in the memory of the loop process."""

    name: str
    """Name of the adapter, which requests have as their model"""
    path: str
    fingerprint: str
    """Hash of the adapter's files, the same on every machine"""
    number: int
    num_bytes: int = 0
    users: int = 0
    """Number of requests that use the adapter"""


class AdapterRegistry:
    """The engine's adapters. An unloaded adapter is dropped when its last request has ended."""

    def __init__(self, model_id: str, most: int, send: Callable[[Command], None]) -> None:
        """most: most adapters in memory. send: sends a command to the loop process."""
        self.most = most
        self._model_id = model_id
        self._send = send
        self._named: dict[str, Adapter] = {}
        self._by_number: dict[int, Adapter] = {}
        """Adapters by number: named ones, loading ones, and unloaded ones with running requests"""
        self._loading: dict[int, asyncio.Future[AdapterLoaded]] = {}
        self._loads: dict[str, asyncio.Task[Adapter]] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._named.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters in memory."""
        return sum(adapter.num_bytes for adapter in self._by_number.values())

    @property
    def named(self) -> Mapping[str, Adapter]:
        """Adapters that requests may ask for, by name."""
        return self._named

    async def changes(self) -> AsyncIterator[Sequence[Adapter]]:
        """Yield all adapters now, and again after changes."""
        while True:
            changed = self._changed
            yield list(self)
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def add_tasks(self, names: Sequence[str], path: str, fingerprint: str) -> None:
        """Add the adapters that the loop has loaded with the model, under the numbers from 1 on.

        Raises StartupError for a name that requests could not use.
        """
        self.most += len(names)
        for number, name in enumerate(names, 1):
            try:
                self._check_name(name)
            except ServiceError as error:
                raise StartupError(f"{path} has a task {name!r}: {error}") from None
            adapter = Adapter(name, path, f"{fingerprint}:{name}", number)
            self._by_number[number] = self._named[name] = adapter

    async def load(self, name: str, path: str) -> Adapter:
        """Load an adapter, unless it is loaded already. Raises ServiceError.

        path: the adapter's directory on the engine's machine. Loading goes on if the caller leaves.
        """
        self._check_name(name)
        if name in self._loads:
            raise _exists(f"The adapter {name!r} is being loaded.")
        if len(self._loads) == self.most:
            raise self._full()
        load = self._loads[name] = asyncio.create_task(self._load(name, path))
        load.add_done_callback(partial(self._on_load_end, name))
        return await asyncio.shield(load)

    def _on_load_end(self, name: str, load: asyncio.Task[Adapter]) -> None:
        del self._loads[name]
        if load.cancelled():  # the engine ends
            return
        if (error := load.exception()) is not None:
            _LOG.warning("adapter %s not loaded: %s", name, error)
        else:
            self._notify()

    async def _load(self, name: str, path: str) -> Adapter:
        if not path:
            raise invalid("path", "path must name the directory of an adapter.")
        try:
            fingerprint = await asyncio.to_thread(_fingerprint, Path(path))
        except OSError as error:
            raise invalid("path", f"{error.filename}: {error.strerror}.") from None
        if (known := self._named.get(name)) is not None:
            if known.fingerprint == fingerprint:
                return known
            raise _exists(f"Another adapter is loaded as {name!r}; unload it first.")
        number = next((i for i in range(1, self.most + 1) if i not in self._by_number), 0)
        if not number:
            raise self._full()
        adapter = self._by_number[number] = Adapter(name, path, fingerprint, number)
        loaded: asyncio.Future[AdapterLoaded] = asyncio.get_running_loop().create_future()
        self._loading[number] = loaded
        self._send(LoadAdapter(number, path))
        answer = await loaded
        if answer.failure:
            raise invalid("path", answer.failure)
        adapter.num_bytes = answer.num_bytes
        self._named[name] = adapter
        _LOG.info("adapter %s: %d bytes from %s", name, adapter.num_bytes, path)
        return adapter

    def on_loaded(self, answer: AdapterLoaded) -> None:
        """Deliver the loop's answer to the load that waits for it."""
        if answer.failure:
            del self._by_number[answer.number]
        waiter = self._loading.pop(answer.number)
        if not waiter.done():  # the engine may be ending
            waiter.set_result(answer)

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter. Running requests go on. Raises NOT_FOUND."""
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "ADAPTER_NOT_FOUND",
                f"No adapter is loaded as {name!r}.",
                field="name",
            )
        self._notify()
        self._drop_if_unused(adapter)

    def enter(self, name: str) -> Adapter | None:
        """Count a request of this model as a user of its adapter; None = the model alone.

        Raises NOT_FOUND if the adapter has been unloaded.
        """
        if name in ("", self._model_id):
            return None
        adapter = self._named.get(name)
        if adapter is None:
            message = f"The adapter {name!r} has been unloaded."
            code = grpc.StatusCode.NOT_FOUND
            raise ServiceError(code, "MODEL_NOT_FOUND", message, field="model")
        adapter.users += 1
        return adapter

    def leave(self, adapter: Adapter) -> None:
        """Subtract a request from an adapter's users."""
        adapter.users -= 1
        self._drop_if_unused(adapter)

    def _drop_if_unused(self, adapter: Adapter) -> None:
        if not adapter.users and self._named.get(adapter.name) is not adapter:
            del self._by_number[adapter.number]
            self._send(UnloadAdapter(adapter.number))

    def _full(self) -> ServiceError:
        return ServiceError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_ADAPTERS",
            f"{self.most} adapters are loaded or loading; unload one, or raise --max-adapters.",
        )

    def _check_name(self, name: str) -> None:
        if not name or len(name) > _MOST_CHARACTERS or not name.isprintable():
            message = f"name must have between 1 and {_MOST_CHARACTERS} printable characters."
            raise invalid("name", message)
        if name in ("default", self._model_id):
            raise invalid("name", f"{name} names the model itself.")


def parse_adapters(text: str) -> dict[str, str]:
    """Return the directories of "name=directory,…" by name. Raises StartupError."""
    adapters = {}
    for part in filter(None, text.split(",")):
        name, separator, path = part.partition("=")
        if not (name and separator and path) or name in adapters:
            raise StartupError(
                f"--adapters {text}: write name=directory, separated by commas, each name once."
            )
        adapters[name] = path
    return adapters


def _fingerprint(directory: Path) -> str:
    """Hash an adapter's files. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _FILES:
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _exists(message: str) -> ServiceError:
    code = grpc.StatusCode.ALREADY_EXISTS
    return ServiceError(code, "ADAPTER_EXISTS", message, field="name")
