"""Model cards: JSON of /v1/models."""

from msgspec import Struct

from services.http_shim.backends.model_source import ListedModel
from tokenwire.pb.models.v1 import model_manager_pb2

__all__ = ["LoadStatus", "ModelCard", "ModelList", "load_status", "model_card"]

_VALUES = {
    model_manager_pb2.MODEL_STATE_LOADED: "loaded",
    model_manager_pb2.MODEL_STATE_LOADING: "loading",
    model_manager_pb2.MODEL_STATE_FAILED: "failed",
}


class LoadStatus(Struct):
    """State of a model in memory."""

    value: str
    """loaded; idle = a request loads it; loading; failed = the last load failed"""
    progress: float | None = None
    """Share of the load that is done, from 0 to 1; null = unknown, or it is not loading"""
    memory_bytes: int | None = None
    """Bytes that the model takes in memory, as estimated before its load; null = not known"""
    idle_until: float | None = None
    """Unix seconds at which the model is unloaded unless a request uses it; null = none"""
    error: str | None = None
    """Reason of the failed load, one sentence"""


class ModelCard(Struct):
    """A model. null = unknown: no backend serves it, or the backend does not answer now."""

    id: str
    object: str
    created: int
    owned_by: str
    aliases: list[str]
    variants: list[str]
    placeholder: bool
    max_model_len: int | None
    max_output_length: int | None
    max_logprobs: int | None
    infill: bool | None
    grammar: bool | None
    chat: bool | None
    max_chat_logprobs: int | None
    system_fingerprint: str | None
    embedding_width: int | None = None
    """Numbers of an embedding; 0 = the model makes none"""
    scores_pairs: bool | None = None
    """It scores pairs of texts by itself, rather than by their embeddings"""
    labels: list[str] | None = None
    """Names of the labels that it sorts texts into"""
    generates: bool | None = None
    model_code: str | None = None
    """Code that computes it: native, or transformers for modules of that library"""
    parent: str | None = None
    """Id of the model that this one is a LoRA adapter of"""
    status: LoadStatus | None = None
    """State of the model in memory; null = it is not served"""


class ModelList(Struct):
    """The models of the server."""

    object: str
    data: list[ModelCard]


def model_card(listed: ListedModel) -> ModelCard:
    """Return the card of a model."""
    row, model = listed.row, listed.model
    context = _least(row.context, None if model is None else model.context_length)
    output = _least(row.max_output_length, None if model is None else model.max_output_length)
    status = load_status(listed.state, on_demand=row.on_demand)
    return ModelCard(
        id=row.full_name,
        object="model",
        created=row.created or (0 if model is None else model.created),
        owned_by=row.owned_by,
        aliases=[name for name in row.names if name != row.full_name],
        variants=[*listed.variants],
        placeholder=row.is_placeholder,
        max_model_len=context,
        max_output_length=_least(output, context),
        max_logprobs=None if model is None else model.max_logprobs,
        infill=None if model is None else model.infill,
        grammar=None if model is None else model.grammar,
        chat=None if model is None else model.chat,
        max_chat_logprobs=None if model is None else model.max_chat_logprobs,
        system_fingerprint=None if model is None else model.system_fingerprint,
        embedding_width=None if model is None else model.embedding_width,
        scores_pairs=None if model is None else model.scores_pairs,
        labels=None if model is None else list(model.labels),
        generates=None if model is None else not model.only_embeds,
        model_code=None if model is None else model.model_code or None,
        parent=row.adapter_of or (None if model is None else model.parent) or None,
        status=None if row.is_placeholder else status,
    )


def load_status(state: model_manager_pb2.Model | None, *, on_demand: bool) -> LoadStatus:
    """Return the status of a model. A model that is not on demand is always loaded."""
    if state is None:
        return LoadStatus("idle" if on_demand else "loaded")
    return LoadStatus(
        _VALUES.get(state.state, "idle"),
        progress=state.progress if state.HasField("progress") else None,
        memory_bytes=state.memory_bytes if state.HasField("memory_bytes") else None,
        idle_until=state.idle_until if state.HasField("idle_until") else None,
        error=state.error or None,
    )


def _least(*lengths: int | None) -> int | None:
    """Return the least of the known lengths, in tokens."""
    return min((length for length in lengths if length is not None), default=None)
