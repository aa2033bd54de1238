"""JSON types of Ollama's API: POST /api/chat and /api/generate."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from services.http_shim.dialects.content_logprobs import ContentLogprob
from services.http_shim.dialects.fields import (
    BOUNDED,
    IDS,
    FrequencyPenalty,
    Int64,
    JsonObject,
    KeepAlive,
    MinP,
    PresencePenalty,
    Priority,
    RepetitionPenalty,
    Strings,
    Timeout,
    Uint32,
    UserLabel,
    about,
)
from services.http_shim.dialects.foreign_fields import ForeignField, ForeignFields
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "FOREIGN_OPTIONS",
    "OllamaAnswer",
    "OllamaAnswerCall",
    "OllamaAnswerFunction",
    "OllamaAnswerMessage",
    "OllamaBody",
    "OllamaCalledFunction",
    "OllamaChatAnswer",
    "OllamaChatBody",
    "OllamaError",
    "OllamaFunctionSpec",
    "OllamaGenerateAnswer",
    "OllamaGenerateBody",
    "OllamaMessage",
    "OllamaName",
    "OllamaOptions",
    "OllamaTool",
    "OllamaToolCall",
]


_NO_EFFECT = about("No effect: it configures how Ollama loads a model.")
OllamaName: TypeAlias = Annotated[
    str | None, about("Name of the model; `name:latest` is the same as `name`.")
]
Images: TypeAlias = Annotated[Strings | None, about("Images in base64: PNG, JPEG, WebP or GIF.")]
Format: TypeAlias = Annotated[
    str | JsonObject | None,
    about("`json` = any JSON object; a JSON Schema = JSON that matches it."),
]
Think: TypeAlias = Annotated[
    bool | Literal["low", "medium", "high", "max"] | None,
    about("Whether, or how much, the model reasons; absent = the model's default."),
]

FOREIGN_OPTIONS: ForeignFields = {
    "typical_p": ForeignField("enables typical sampling", (0, 1)),
    "tfs_z": ForeignField("enables tail-free sampling", (0, 1)),
    "penalize_newline": ForeignField("changes which tokens count as repeated", (True,)),
}
"""Options that this server lacks, refused unless their value has no effect"""


class OllamaOptions(Struct):
    """`options`; an absent one has Ollama's default."""

    num_predict: Annotated[
        Int64 | None, about("Most tokens of the answer; 0 and below = the rest of the context.")
    ] = None
    temperature: Annotated[
        float | None, about("Temperature; 0 = greedy.", "sampling.temperature", default=0.8)
    ] = None
    top_k: Annotated[
        Int64 | None,
        about("Number of likeliest tokens to sample from; 0 and below = all.", default=40),
    ] = None
    top_p: Annotated[float | None, about("Nucleus mass.", "sampling.top_p", default=0.9)] = None
    min_p: MinP = None
    seed: Annotated[Int64 | None, about("Seed of the sampling; -1 = a random one.")] = None
    stop: Annotated[
        str | Strings | None, about("Strings that end the answer and are cut off.", "stop")
    ] = None
    repeat_penalty: RepetitionPenalty = None
    repeat_last_n: Annotated[
        Int64 | None,
        about(
            "Last tokens of prompt and answer that the penalties count; -1 = all, 0 = none.",
            minimum=-1,
            default=64,
        ),
    ] = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    num_ctx: Annotated[
        Uint32 | None,
        about("Most tokens of prompt and answer together, up to the model's.", minimum=1),
    ] = None
    mirostat: Annotated[
        Literal[0, 1, 2] | None, about("2 = Mirostat 2, in place of top_k, top_p and min_p.")
    ] = None
    mirostat_tau: Annotated[float | None, about("Target surprise, in bits.", default=5)] = None
    mirostat_eta: Annotated[
        float | None,
        about("Learning rate of Mirostat.", "sampling.mirostat.learning_rate", default=0.1),
    ] = None
    typical_p: Annotated[Any, about("Not supported: leave it out.", enum=[None, 0, 1])] = None
    tfs_z: Annotated[Any, about("Not supported: leave it out.", enum=[None, 0, 1])] = None
    penalize_newline: Annotated[Any, about("Not supported: leave it out.", enum=[None, True])] = (
        None
    )
    num_keep: Annotated[Any, about("No effect: this server shifts no contexts.")] = None
    numa: Annotated[Any, _NO_EFFECT] = None
    num_batch: Annotated[Any, _NO_EFFECT] = None
    num_gpu: Annotated[Any, _NO_EFFECT] = None
    main_gpu: Annotated[Any, _NO_EFFECT] = None
    low_vram: Annotated[Any, _NO_EFFECT] = None
    f16_kv: Annotated[Any, _NO_EFFECT] = None
    logits_all: Annotated[Any, _NO_EFFECT] = None
    vocab_only: Annotated[Any, _NO_EFFECT] = None
    use_mmap: Annotated[Any, _NO_EFFECT] = None
    use_mlock: Annotated[Any, _NO_EFFECT] = None
    embedding_only: Annotated[Any, _NO_EFFECT] = None
    num_thread: Annotated[Any, _NO_EFFECT] = None
    draft_num_predict: Annotated[Any, _NO_EFFECT] = None


class OllamaBody(Struct):
    """Fields that the bodies of requests to a model share."""

    model: OllamaName = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    # this server's own
    user: UserLabel = None
    priority: Priority = None
    timeout: Timeout = None


class OllamaGenerationBody(OllamaBody):
    """Fields that the bodies of chats and generation share."""

    stream: Annotated[
        bool | None, about("Answer with a line of JSON for each part.", default=True)
    ] = None
    format: Format = None
    think: Think = None
    truncate: Annotated[
        bool | None,
        about("Leave out the oldest messages of a prompt that is too long.", default=True),
    ] = None
    shift: Annotated[
        bool | None,
        about("No effect: an answer ends at the end of the context.", default=True),
    ] = None
    logprobs: Annotated[
        bool | None, about("Return the log probability of each token.", default=False)
    ] = None
    top_logprobs: Annotated[
        Uint32 | None, about("Candidates for each token; only with logprobs.", "logprobs")
    ] = None


class OllamaCalledFunction(Struct):
    """`function` of a call."""

    name: str
    arguments: JsonObject | str | None = None
    """An object; some clients write its text"""
    index: Any = None


class OllamaToolCall(Struct):
    """A call of the assistant."""

    function: OllamaCalledFunction
    id: str | None = None
    type: Any = None


class OllamaMessage(Struct):
    """One of `messages`. A tool's message names its tool, its call, or neither."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: Annotated[
        Annotated[list[OllamaToolCall], BOUNDED] | None,
        about("Calls of the assistant.", "tool_calls", completion_pb2.Message),
    ] = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunctionSpec(Struct):
    """`function` of a tool."""

    name: Annotated[str, about("Name of the tool.", "name", completion_pb2.Tool)]
    description: str | None = None
    parameters: JsonObject | None = None


class OllamaTool(Struct):
    """One of `tools`."""

    function: OllamaFunctionSpec
    type: str | None = None
    items: Any = None


class OllamaChatBody(OllamaGenerationBody):
    """The body of POST /api/chat."""

    messages: Annotated[
        Annotated[list[OllamaMessage], BOUNDED] | None,
        about("The conversation; absent or empty = load the model, or unload it."),
    ] = None
    tools: Annotated[
        Annotated[list[OllamaTool], BOUNDED] | None,
        about("Tools that the model may call.", "tools"),
    ] = None


class OllamaGenerateBody(OllamaGenerationBody):
    """The body of POST /api/generate."""

    prompt: Annotated[
        str | None, about("The text; absent or empty = load the model, or unload it.")
    ] = None
    suffix: Annotated[
        str | None, about("The text after the gap; the model generates the text between.")
    ] = None
    system: Annotated[str | None, about("The system's message.")] = None
    template: Annotated[
        str | None, about("Not supported: use raw with a rendered prompt.", maxLength=0)
    ] = None
    context: Annotated[
        Annotated[list[Uint32], IDS] | None, about("The `context` of an earlier answer.")
    ] = None
    raw: Annotated[
        bool | None, about("Continue the prompt as it is, without a template.", default=False)
    ] = None
    images: Images = None


class OllamaAnswerFunction(Struct):
    """The called function."""

    index: int
    name: str
    arguments: Any
    """An object"""


class OllamaAnswerCall(Struct):
    """A call of a tool."""

    id: str
    function: OllamaAnswerFunction


class OllamaAnswerMessage(Struct):
    """The assistant's message, or a part of it."""

    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaAnswerCall] | UnsetType = UNSET


class OllamaAnswer(Struct):
    """Fields that the answers share. Durations are in nanoseconds; the last line has them."""

    model: str
    created_at: str
    """RFC 3339"""
    done: bool = False
    done_reason: str | UnsetType = UNSET
    """stop, length, load or unload"""
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """An answer of /api/chat, or a line of it."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """An answer of /api/generate, or a line of it."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    """Ids of the prompt and of the answer"""


class OllamaError(Struct):
    """An error."""

    error: Annotated[str, Meta(description="A sentence.")]
