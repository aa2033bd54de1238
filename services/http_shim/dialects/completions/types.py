"""JSON types of completions: POST /v1/completions."""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.dialects.choices import PromptLogprobs
from services.http_shim.dialects.fields import IDS, Strings, Uint32
from services.http_shim.dialects.foreign_fields import FOREIGN_TO_COMPLETIONS
from services.http_shim.dialects.generation import GenerationBody

__all__ = ["Choice", "CompletionBody", "Logprobs"]


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    foreign = FOREIGN_TO_COMPLETIONS

    # msgspec allows one array type in a union; `prompts_of` checks that elements agree
    prompt: str | Annotated[list[str | Uint32 | Annotated[list[Uint32], IDS]], IDS] | None = None
    suffix: str | None = None
    best_of: Uint32 | None = None
    echo: bool | None = None
    logprobs: Uint32 | None = None
    truncate_sequence: bool | None = None
    images: Strings | None = None
    # vLLM's and transformers' fields
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None


class Logprobs(Struct):
    """Log probabilities: four parallel lists with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Struct):
    """A choice, or a part of it in a chunk."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    matched_stop: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
