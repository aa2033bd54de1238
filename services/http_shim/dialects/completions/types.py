"""JSON types of completions: POST /v1/completions."""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.dialects.choices import PromptLogprobs
from services.http_shim.dialects.fields import IDS, Strings, Uint32, about
from services.http_shim.dialects.foreign_fields import FOREIGN_TO_COMPLETIONS
from services.http_shim.dialects.generation import GenerationBody

__all__ = ["Choice", "CompletionBody", "Logprobs"]


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    foreign = FOREIGN_TO_COMPLETIONS

    # msgspec allows one array type in a union; `prompts_of` checks that elements agree
    prompt: Annotated[
        str | Annotated[list[str | Uint32 | Annotated[list[Uint32], IDS]], IDS] | None,
        about(
            "A text, several texts, token ids, or several lists of token ids.",
            anyOf=[
                {"type": "string"},
                {"type": "array", "minItems": 1, "maxItems": 128, "items": {"type": "string"}},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "integer", "minimum": 0, "maximum": 4294967295},
                },
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 128,
                    "items": {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "integer", "minimum": 0, "maximum": 4294967295},
                    },
                },
            ],
        ),
    ] = None
    suffix: Annotated[
        str | None, about("The text after the gap; the model generates the text between.")
    ] = None
    best_of: Annotated[
        Uint32 | None, about("Candidates, of which the n best are returned; at most n in a stream.")
    ] = None
    echo: Annotated[bool | None, about("Start each choice with the prompt.", default=False)] = None
    logprobs: Annotated[
        Uint32 | None, about("Candidates for each token; above 5 only if the server allows it.")
    ] = None
    truncate_sequence: Annotated[
        bool | None, about("Keep the end of a prompt that exceeds the context.", default=False)
    ] = None
    images: Annotated[
        Strings | None,
        about(
            "Data URLs of the images for each `<image>` of the prompts, in order: "
            "data:image/png;base64,… (or jpeg, webp, gif). http(s) URLs if the server "
            "fetches them."
        ),
    ] = None
    # vLLM's and transformers' fields
    use_beam_search: Annotated[
        bool | None, about("Search with max(n, best_of) beams instead of sampling.", default=False)
    ] = None
    length_penalty: Annotated[
        float | None,
        about("Beams are ranked by the sum of their logprobs / length^length_penalty.", default=1),
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None,
        about(
            "End of a beam search: true = once as many choices have ended as there are "
            'beams; false = once the best beam ranks below them; "never" = once no beam can '
            "rank above one of them.",
            default=False,
        ),
    ] = None


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
