"""Catalog: a TOML file that names the models of one server.

[[models]]
id = "small"
aliases = ["tiny"]
path = "models/small"            # `tokenwire serve` starts the services of this checkpoint

[[models]]
id = "small-sql"
adapter_of = "small"             # a LoRA adapter
path = "adapters/sql"            # left out if the model has a target, which has the adapter loaded

[[models]]
id = "acme/large"
target = "10.0.0.7:50051"        # a running tokenizer service
max_output_length = 4096

[models.variants.int8]           # acme/large:int8
target = "10.0.0.8:50051"

[[models]]
id = "night"
path = "models/night"
on_demand = true                 # `tokenwire serve` loads it when a request names it
keep_alive = "10m"               # and unloads it so long after its last use

[[models]]
id = "acme/soon"
placeholder = true               # listed, but not served
"""

import json
import re
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from services.common.model_files.hub import HubCheckpoint
from services.common.model_files.keep_alive import parse_keep_alive
from services.common.model_files.short_list import listed_model
from services.common.network.addresses import split_targets

__all__ = [
    "NO_TOKEN",
    "CatalogError",
    "CatalogModel",
    "catalog_id",
    "read_catalog",
    "write_catalog",
]

NO_TOKEN = Path()
"""File of a row with the empty name: its service is shown no token"""

_LONGEST_ID = 200
_NO_ID = re.compile(r"[^A-Za-z0-9._/@+:-]+")
_Id: TypeAlias = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/@+:-]*\Z", max_length=_LONGEST_ID)
]
_Variant: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=100)]
_Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**32 - 1)]
_Seconds: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
_RESERVED = "default"
"""Name by which requests mean the only model of a server"""


class CatalogError(Exception):
    """The catalog can't be used. The message is one sentence."""


def catalog_id(name: str) -> str:
    """Return the id for a model of this name, such as my-model for `my model`.

    A name without a letter or digit of ASCII gets a checksum, so that two of them differ.
    """
    allowed = _NO_ID.sub("-", name).strip("-").lstrip("._/@+:-")[:_LONGEST_ID]
    return allowed or f"model-{zlib.crc32(name.encode('utf-8', 'surrogateescape')):08x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogModel:
    """A model, or a variant of one, that requests can name."""

    id: str
    """Canonical id; variants have the id of their model"""
    variant: str = ""
    names: tuple[str, ...] = ()
    """All names by which requests can choose the model"""
    target: str | None = None
    """Address host:port of the model's tokenizer service"""
    peer_token_file: Path | None = None
    """Token that the service at the target is shown; None = that of the whole server, if any;
    NO_TOKEN = none"""
    path: Path | None = None
    """Directory of a checkpoint, or hf:owner/name, whose services `tokenwire serve` starts; a short
    name is written as hf:owner/name"""
    adapter_of: str = ""
    """Id of the base model of a LoRA adapter, whose directory is `path`; empty = not an adapter"""
    adapters: tuple[tuple[str, Path], ...] = ()
    """Ids and directories of the LoRA adapters that the checkpoint's engines load"""
    dtype: str = "auto"
    engine_args: str = ""
    replicas: int = 1
    """Engines that `tokenwire serve` starts for the checkpoint"""
    chat_template: Path | None = None
    """Jinja file of the default chat template; None = the checkpoint's"""
    on_demand: bool = False
    """True if the services run only while requests use the model"""
    keep_alive: float | None = None
    """Seconds that a model on demand stays in memory after its last use; None = the default"""
    max_output_length: int | None = None
    """Most tokens of a choice; None = the backend's limit"""
    context: int | None = None
    """Tokens of prompt and output together; None = the backend's limit"""
    owned_by: str = "tokenwire"
    created: int = 0
    """Unix seconds; 0 = as the backend reports"""

    @property
    def is_placeholder(self) -> bool:
        """True for a model that no service serves."""
        return self.target is None and self.path is None

    @property
    def full_name(self) -> str:
        """Id, or id:variant."""
        return f"{self.id}:{self.variant}" if self.variant else self.id


class _Deployment(Struct, forbid_unknown_fields=True, kw_only=True):
    target: str | None = None
    peer_token_file: str | None = None
    path: str | None = None
    dtype: str | None = None
    engine_args: str | None = None
    replicas: Annotated[int, Meta(ge=1, le=64)] | None = None
    chat_template: str | None = None
    on_demand: bool | None = None
    keep_alive: str | float | None = None
    max_output_length: _Tokens | None = None
    context: _Tokens | None = None


class _Row(_Deployment, forbid_unknown_fields=True, kw_only=True):
    id: _Id
    aliases: list[_Id] = []
    placeholder: bool = False
    adapter_of: _Id | None = None
    owned_by: str = "tokenwire"
    created: _Seconds = 0
    variants: dict[_Variant, _Deployment] = {}


class _File(Struct, forbid_unknown_fields=True):
    models: list[_Row]


def read_catalog(path: Path, *, may_be_empty: bool = False) -> tuple[CatalogModel, ...]:
    """Read the models in the file's order, each before its variants. Raises CatalogError.

    may_be_empty: a server whose models come from folders may have none yet.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
        rows = msgspec.convert(content, _File).models
        if not (rows or may_be_empty):
            raise ValueError("the list of models has a length of 0")
        models = _with_adapters([model for row in rows for model in _models(row, path.parent)])
        _require_distinct(models)
        _require_one_token(models)
    except OSError as error:
        raise CatalogError(f"The catalog {path} can't be read: {error.strerror}.") from None
    except RecursionError:
        raise CatalogError(f"The catalog {path} is nested too deeply.") from None
    except UnicodeDecodeError:
        raise CatalogError(f"The catalog {path} is not UTF-8.") from None
    except ValueError as error:  # raised by the TOML parser, by a type, or below
        why = " ".join(str(error).split()).rstrip(".")
        raise CatalogError(f"The catalog {path} is wrong: {why}.") from None
    return models


def write_catalog(path: Path, models: Sequence[CatalogModel]) -> None:
    """Write models whose targets are all known, atomically."""
    temporary = path.with_name(path.name + ".new")
    lines = [line for model in models for line in _lines(model)] or ["models = []"]
    temporary.write_text("\n".join(lines), "utf-8")
    temporary.replace(path)


def _models(row: _Row, folder: Path) -> Iterator[CatalogModel]:
    if row.adapter_of is not None:
        yield _adapter(row, row.adapter_of, folder)
        return
    if row.placeholder == (row.target is not None or row.path is not None):
        raise ValueError(f"model {row.id} needs one of target, path and placeholder = true")
    spellings = (row.id, *row.aliases)
    model = replace(
        _apply(CatalogModel(id=row.id, names=spellings), row, folder),
        owned_by=row.owned_by,
        created=row.created,
    )
    yield model
    for name, deployment in row.variants.items():
        names = tuple(f"{spelling}:{name}" for spelling in spellings)
        variant = replace(model, variant=name, names=names)
        yield _apply(variant, deployment, folder)


def _adapter(row: _Row, base: str, folder: Path) -> CatalogModel:
    """Return the model of an adapter's row. base: id of its base model, which has the target."""
    started = (row.dtype, row.engine_args, row.replicas, row.chat_template, row.on_demand)
    if row.target is not None or any(started) or row.placeholder or row.variants:
        raise ValueError(
            f"the adapter {row.id} can't have target, placeholder, variants, dtype, engine_args, "
            f"replicas, chat_template and on_demand: its model, {base}, has them"
        )
    return CatalogModel(
        id=row.id,
        names=(row.id, *row.aliases),
        path=None if row.path is None else (folder / row.path).absolute(),
        adapter_of=base,
        max_output_length=row.max_output_length,
        context=row.context,
        owned_by=row.owned_by,
        created=row.created,
    )


def _with_adapters(models: Sequence[CatalogModel]) -> tuple[CatalogModel, ...]:
    """Set the targets of adapters to those of their models, and the `adapters` of the models."""
    bases = {model.id: model for model in models if not (model.variant or model.adapter_of)}
    loaded: dict[str, list[tuple[str, Path]]] = {}
    completed = []
    for model in models:
        if model.adapter_of:
            base = bases.get(model.adapter_of)
            if base is None or base.is_placeholder:
                raise ValueError(f"{model.adapter_of}, the model of {model.id}, is not served here")
            if (base.path is None) != (model.path is None):
                which = "needs a path" if model.path is None else "can't have a path"
                has = "a path" if base.path is not None else "a target"
                raise ValueError(f"the adapter {model.id} {which}: its model has {has}")
            if model.path is not None:
                loaded.setdefault(base.id, []).append((model.id, model.path))
            model = replace(
                model,
                target=base.target,
                peer_token_file=base.peer_token_file,
                on_demand=base.on_demand,
            )
        completed.append(model)
    return tuple(
        replace(model, adapters=tuple(loaded[model.id]))
        if model.id in loaded and model.path == bases[model.id].path
        else model
        for model in completed
    )


def _apply(model: CatalogModel, deployment: _Deployment, folder: Path) -> CatalogModel:
    """Return the model with the deployment's values; an absent value stays as it is."""
    if deployment.target is not None and deployment.path is not None:
        raise ValueError(f"model {model.full_name} has both target and path")
    if deployment.target is not None:
        _require_target(model, deployment.target)
        model = replace(model, target=deployment.target, peer_token_file=None, path=None)
    if deployment.path is not None:
        path = _checkpoint(deployment.path, folder)
        model = replace(model, target=None, peer_token_file=None, path=path)
    if deployment.peer_token_file is not None:
        if model.target is None:
            raise ValueError(f"peer_token_file of model {model.full_name} needs a target")
        named = deployment.peer_token_file
        token = (folder / named).absolute() if named else NO_TOKEN
        model = replace(model, peer_token_file=token)
    started = (deployment.dtype, deployment.engine_args, deployment.replicas)
    if model.path is None and (any(started) or deployment.chat_template):
        raise ValueError(
            f"dtype, engine_args, replicas and chat_template of model {model.full_name} need a path"
        )
    if deployment.dtype is not None:
        model = replace(model, dtype=deployment.dtype)
    if deployment.engine_args is not None:
        model = replace(model, engine_args=deployment.engine_args)
    if deployment.replicas is not None:
        model = replace(model, replicas=deployment.replicas)
    if deployment.chat_template is not None:
        model = replace(model, chat_template=(folder / deployment.chat_template).absolute())
    model = _apply_demand(model, deployment)
    return replace(
        model,
        max_output_length=deployment.max_output_length or model.max_output_length,
        context=deployment.context or model.context,
    )


def _checkpoint(text: str, folder: Path) -> Path:
    """Return the path of a row's checkpoint; a model of the hub as hf:owner/name."""
    path = (folder / text).absolute()
    if HubCheckpoint.is_named_by(text):
        return Path(text)
    if not path.exists() and (listed := listed_model(text)) is not None:
        return Path(f"hf:{listed.source}")
    return path


def _apply_demand(model: CatalogModel, deployment: _Deployment) -> CatalogModel:
    if deployment.on_demand is not None:
        model = replace(model, on_demand=deployment.on_demand)
    if deployment.keep_alive is not None:
        if not model.on_demand:
            raise ValueError(f"keep_alive of model {model.full_name} needs on_demand = true")
        try:
            model = replace(model, keep_alive=parse_keep_alive(deployment.keep_alive))
        except ValueError as error:
            raise ValueError(f"keep_alive of model {model.full_name} {error}") from None
    return model


def _require_target(model: CatalogModel, target: str) -> None:
    try:
        split_targets(target)
    except ValueError as error:
        raise ValueError(f"the target of model {model.full_name} must have {error}") from None


def _require_one_token(models: Sequence[CatalogModel]) -> None:
    tokens: dict[str, Path | None] = {}
    for model in models:
        if model.target is None:
            continue
        if tokens.setdefault(model.target, model.peer_token_file) != model.peer_token_file:
            raise ValueError(f"the target {model.target} has several values of peer_token_file")


def _require_distinct(models: Sequence[CatalogModel]) -> None:
    seen: set[str] = set()
    for model in models:
        for name in model.names:
            if name == _RESERVED:
                raise ValueError(f"{_RESERVED} can't name a model: it stands for the only model")
            if name in seen:
                raise ValueError(f"the name {name} occurs twice")
            seen.add(name)


def _lines(model: CatalogModel) -> Iterator[str]:
    """Yield TOML lines; JSON strings, numbers and lists are valid TOML."""
    if model.variant:
        yield f"[models.variants.{json.dumps(model.variant)}]"
    else:
        yield "[[models]]"
        yield f"id = {json.dumps(model.id)}"
        yield f"aliases = {json.dumps(model.names[1:])}"
        yield f"owned_by = {_string(model.owned_by)}"
        yield f"created = {model.created}"
        if model.is_placeholder:
            yield "placeholder = true"
    if model.adapter_of:
        yield f"adapter_of = {json.dumps(model.adapter_of)}"
    elif model.target is not None:
        yield f"target = {_string(model.target)}"
    if model.peer_token_file is not None and not model.adapter_of:
        token = model.peer_token_file
        yield f"peer_token_file = {_string('' if token == NO_TOKEN else str(token))}"
    if model.on_demand and not model.adapter_of:
        yield "on_demand = true"
    if model.max_output_length is not None:
        yield f"max_output_length = {model.max_output_length}"
    if model.context is not None:
        yield f"context = {model.context}"
    yield ""


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
