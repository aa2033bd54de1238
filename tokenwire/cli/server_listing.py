"""Models of running servers, asked over HTTP."""

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenwire.cli.output import JsonObject
from tokenwire.serving.running_servers import RunningServer

__all__ = ["HttpServer", "ServerListing", "listing_of", "unload"]

_SECONDS = 5.0
_UNLOAD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class HttpServer:
    """An HTTP server, and how to ask it."""

    url: str
    key: str
    tls: ssl.SSLContext | None

    def get(self, path: str) -> Any:
        """Return the JSON of a path. Raises OSError, ValueError, or HTTPError of a refusal."""
        return self._send(urllib.request.Request(self.url + path), _SECONDS)

    def post(self, path: str, body: JsonObject) -> Any:
        """Return the JSON that answers a body. Raises as `get`."""
        headers = {"content-type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        return self._send(request, _UNLOAD_SECONDS)

    def _send(self, request: urllib.request.Request, seconds: float) -> Any:
        if self.key:
            request.add_unredirected_header("authorization", f"Bearer {self.key}")
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=self.tls))
        with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as reply:
            return json.load(reply)


@dataclass(frozen=True, slots=True)
class ServerListing:
    """State of one server, as `ps` shows it."""

    url: str
    server: RunningServer | None = None
    problem: str = ""
    """Reason why the models are not known; empty = they are known"""
    models: Sequence[dict[str, Any]] = field(default_factory=list)
    memory_bytes: int | None = None
    """Memory of the server's processes; None = another machine's"""

    def as_json(self) -> JsonObject:
        """Return the object of --json."""
        own = self.server
        return {
            "url": self.url,
            "pid": own.pid if own else None,
            "background": own.is_background if own else None,
            "since": own.since if own else None,
            "memory_bytes": self.memory_bytes,
            "problem": self.problem or None,
            "models": [dict(model) for model in self.models],
        }


def listing_of(
    url: str, server: RunningServer | None, key: str, tls: ssl.SSLContext | None
) -> ServerListing:
    """Ask a server for its models."""
    memory = None if server is None else _memory_of(server.pid)
    reachable = HttpServer(url.rstrip("/").removesuffix("/v1"), key, tls)
    try:
        cards = reachable.get("/v1/models")["data"]
        status = _status(reachable)
    except urllib.error.HTTPError as error:
        return ServerListing(url, server, refusal_of(error), memory_bytes=memory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", None) or error
        return ServerListing(url, server, f"it does not answer: {reason}", memory_bytes=memory)
    models = [_model(card, status.get(card["id"]), server) for card in cards]
    return ServerListing(url, server, "", models, memory)


def _status(reachable: HttpServer) -> dict[str, Any]:
    """Return the models of /status.json by id; nothing for servers of other makers."""
    try:
        return {model["id"]: model for model in reachable.get("/status.json")["models"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _model(card: Any, status: Any, server: RunningServer | None) -> dict[str, Any]:
    state = card.get("status") or {}
    uptime = (status or {}).get("uptime_seconds")
    return {
        "id": card["id"],
        "state": state.get("value", "loaded"),
        "progress": state.get("progress"),
        "memory_bytes": state.get("memory_bytes"),
        "context": card.get("max_model_len"),
        "since": None if uptime is None else time.time() - uptime,
        "idle_until": state.get("idle_until"),
        "error": state.get("error"),
    }


def _memory_of(pid: int) -> int | None:
    """Return the memory of a process and its descendants, shared pages in equal parts."""
    total, pending = 0, [pid]
    try:
        while pending:
            each = pending.pop()
            lines = Path(f"/proc/{each}/smaps_rollup").read_text("ascii").splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
            for task in Path(f"/proc/{each}/task").iterdir():
                pending += map(int, (task / "children").read_text("ascii").split())
    except (OSError, ValueError):
        return None
    return total


def refusal_of(error: urllib.error.HTTPError) -> str:
    """Return the message of a refusal."""
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"It answers with status {error.code}."


def unload(server: HttpServer, model: str) -> str:
    """Unload a model. Return the reason of a refusal; empty if it is unloaded."""
    try:
        server.post("/v1/models/unload", {"model": model})
    except urllib.error.HTTPError as error:
        return refusal_of(error)
    except (OSError, ValueError) as error:
        return f"{server.url} does not answer: {error}."
    return ""
