"""A hub of one machine, which speaks the part of the Hugging Face API that downloads use."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

__all__ = ["COMMIT", "Hub", "running_hub"]

_LARGE = (".safetensors", ".gguf")
"""Files that the hub names by their SHA-256"""
COMMIT = "8123ea2e9354afb7ffcc6c8641d1b2f5ecf18301"


class Hub:
    """Repositories by name, each a directory, and the files that were downloaded."""

    def __init__(self, repositories: dict[str, Path], gated: str = "") -> None:
        self.repositories = repositories
        self.gated = gated
        self.downloaded: list[str] = []
        self.ranges: list[str] = []
        """Ranges of bytes that were asked for"""
        self.url = ""
        self.may_send = Event()
        """Answers of more than a megabyte wait until this is set"""
        self.may_send.set()
        self.waits = Event()
        """Set once such an answer waits"""


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """Serve the repositories at a free port of loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        repository = f"{owner}/{name}"
        folder = self.hub.repositories.get(repository)
        if folder is None:
            return self._refuse(404, "RepoNotFound")
        if repository == self.hub.gated and not is_api:
            return self._refuse(403, "GatedRepo")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if not is_api:
            return self._send_file(folder, "/".join(rest[2:]))
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if rest[:1] == ["tree"]:
            return self._send_json([_entry(file, folder) for file in files])
        names = [{"rfilename": str(file.relative_to(folder))} for file in files]
        return self._send_json({"id": repository, "sha": COMMIT, "siblings": names})

    def _send_file(self, folder: Path, name: str) -> None:
        file = folder / name
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        content = file.read_bytes()
        is_large = name.endswith(_LARGE)
        tag = hashlib.sha256(content).hexdigest() if is_large else _digest(content)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
        if self.command == "HEAD":
            return self._send(200, content, headers)
        self.hub.downloaded.append(name)
        asked = self.headers.get("Range")
        begin = 0 if asked is None else int(asked.removeprefix("bytes=").rstrip("-"))
        if asked is None:
            return self._send(200, content, headers)
        self.hub.ranges.append(asked)
        headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        return self._send(206, content[begin:], headers)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            if len(content) > 2**20:
                self.hub.waits.set()
                self.hub.may_send.wait()
            with suppress(ConnectionError):  # the client has given up
                self.wfile.write(content)


def _entry(file: Path, folder: Path) -> dict[str, object]:
    content = file.read_bytes()
    name = str(file.relative_to(folder))
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
