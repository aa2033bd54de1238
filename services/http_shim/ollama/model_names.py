"""Names of models as Ollama's clients write them."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.http_shim.backends.model_source import ModelSource
from tokenwire.errors import ServiceError, invalid

__all__ = ["LATEST", "existing_name", "hub_name", "naming", "tagged"]

LATEST = ":latest"
"""Tag that a name without one has"""
_NOT_FOUND = "MODEL_NOT_FOUND"
_HOSTS = ("hf.co/", "huggingface.co/")
"""Hosts that Ollama's names of the hub's models begin with"""


async def existing_name(models: ModelSource, name: str) -> str:
    """Return the name by which this server knows a model; `name:latest` may be `name`.

    Raises INVALID_ARGUMENT for an empty name. An unknown one is returned as it is.
    """
    if not name:
        raise invalid("model", "model is required.")
    name = hub_name(name) if name.startswith(_HOSTS) else name
    if not name.endswith(LATEST):
        return name
    try:
        await models.find(name)
        await models.require([name])
    except ServiceError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        return name.removesuffix(LATEST)
    return name


def hub_name(name: str) -> str:
    """Return the name of a model to download: without the hub's host, and without `:latest`."""
    for host in _HOSTS:
        name = name.removeprefix(host)
    return name.removesuffix(LATEST)


def tagged(name: str) -> str:
    """Return a name with a tag, as Ollama lists it."""
    return name if ":" in name else name + LATEST


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Report an unknown model in Ollama's words, which clients look for."""
    try:
        yield
    except ServiceError as error:
        if error.reason == _NOT_FOUND:
            error.message, error.field = f"model '{name}' not found", ""
        raise
