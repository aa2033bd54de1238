"""Reading of Ollama's chats and generation."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from services.common.constraint_texts import json_text
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.fields import JsonObject, read_keep_alive
from services.http_shim.dialects.foreign_fields import check_foreign
from services.http_shim.dialects.ollama.closed_schema import closed_schema
from services.http_shim.dialects.ollama.types import (
    FOREIGN_OPTIONS,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaMessage,
    OllamaOptions,
    OllamaTool,
)
from services.http_shim.dialects.ollama.write import ChatForm, Form, GenerateForm, OllamaWriter
from services.http_shim.dialects.reading import MessageReading, Reading
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["OllamaReading", "read_ollama_chat", "read_ollama_generation"]

_ROLES = {
    "system": completion_pb2.ROLE_SYSTEM,
    "developer": completion_pb2.ROLE_DEVELOPER,
    "user": completion_pb2.ROLE_USER,
    "assistant": completion_pb2.ROLE_ASSISTANT,
    "tool": completion_pb2.ROLE_TOOL,
}
_NAMES: Mapping[str, str] = {
    "prompts": "prompt",
    "prompts.suffix": "suffix",
    "prompts.images": "images",
    "conversation.template_arguments_json": "think",
    "conversation.reasoning_effort": "think",
    "conversation.continue_last_message": "messages",
    "drop_oldest_messages": "truncate",
    "truncate_prompt": "truncate",
    "delivery": "stream",
    "logprobs": "top_logprobs",
    "grammar": "format",
    "stop": "options.stop",
    "stopping.max_tokens": "options.num_predict",
    "stopping.context_length": "options.num_ctx",
    "sampling.repetition_penalty": "options.repeat_penalty",
    "sampling.penalty_window": "options.repeat_last_n",
    "sampling.mirostat.target_perplexity": "options.mirostat_tau",
    "sampling.mirostat.learning_rate": "options.mirostat_eta",
    **{
        f"sampling.{name}": f"options.{name}"
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed", "mirostat"),
            *("frequency_penalty", "presence_penalty"),
        )
    },
}
# Ollama's defaults
_TEMPERATURE, _TOP_K, _TOP_P, _REPEAT_LAST_N = 0.8, 40, 0.9, 64
_TAU, _ETA = 5.0, 0.1
_EVERYTHING = 2**32 - 1  # tokens
_Sampling: TypeAlias = types_pb2.SamplingParams


class OllamaReading(Reading):
    """A reading of Ollama's API, and what concerns the model as a whole."""

    def __init__(self, ignored: list[str], body: OllamaBody) -> None:
        """Raises INVALID_ARGUMENT without a model."""
        super().__init__(ignored, _NAMES)
        if not body.model:
            raise invalid("model", "model is required.")
        self.named = body.model
        """Name of the model, as the client wrote it"""
        self.keep_alive = read_keep_alive(body.keep_alive)
        """Seconds that the unused model stays in memory; None = the server's default"""
        self.has_input = True
        """False if the model is only loaded, or unloaded"""
        self.must_reason = False
        """The client asks for reasoning, which a model without it refuses"""
        self.context: Sequence[int] = ()
        """Ids before the prompt of the conversation"""
        self.takes_all_room = False
        """The answer to a prompt may fill the context"""
        self.bare_question: str | None = None
        """Prompt of a conversation that has nothing else; None = another request"""
        self.priority, self.timeout = body.priority, body.timeout
        self.request.model = body.model
        self.request.user = body.user or ""

    @property
    def unloads(self) -> bool:
        """True if the request asks for nothing but to unload the model."""
        return not self.has_input and self.keep_alive == 0

    def ask_without_template(self) -> None:
        """Send the bare question as a prompt, which no template renders."""
        assert self.bare_question is not None
        assert isinstance(self.writer, OllamaWriter)
        self.writer.omit_context()
        self.add_prompt(self.bare_question)

    def add_prompt(self, text: str) -> None:
        """Make the request one for a prompt that no template renders."""
        request = self.request
        request.prompts.items.add(text=text)
        request.truncate_prompt = request.drop_oldest_messages
        request.drop_oldest_messages = False
        self.takes_all_room = not request.stopping.HasField("max_tokens")


def read_ollama_chat(fields: JsonObject) -> OllamaReading:
    """Read the body of a chat. Raises INVALID_ARGUMENT with the client's name of a field."""
    body, ignored = body_of(OllamaChatBody, fields)
    reading = _read_generation(body, ignored, fields, ChatForm())
    conversation = reading.request.conversation
    conversation.SetInParent()
    calls = _OpenCalls()
    for index, message in enumerate(body.messages or ()):
        _read_message(reading, message, f"messages[{index}]", calls)
    reading.has_input = bool(conversation.messages)
    if reading.has_input:
        last = conversation.messages[-1]  # an answer that the client began is continued
        is_answer = last.role == completion_pb2.ROLE_ASSISTANT
        conversation.continue_last_message = is_answer and not last.tool_calls
    for index, tool in enumerate(body.tools or ()):
        _read_tool(reading, tool, index)
    _read_think(reading, body)
    return reading


def read_ollama_generation(fields: JsonObject) -> OllamaReading:
    """Read the body of a generation. Raises INVALID_ARGUMENT with the client's name of a field."""
    body, ignored = body_of(OllamaGenerateBody, fields)
    if body.template:
        raise invalid(
            "template",
            "template is not supported: the model's own chat template applies; render the prompt "
            "yourself and send it with raw: true.",
        )
    if body.raw and (body.system or body.context):
        raise invalid("raw", "raw mode does not support template, system, or context.")
    reading = _read_generation(
        body, ignored, fields, GenerateForm(returns_context=not (body.raw or body.suffix))
    )
    reading.has_input = bool(body.prompt or body.suffix)
    if body.raw or body.suffix:
        _read_prompt(reading, body)
    else:
        _read_question(reading, body)
    return reading


def _read_prompt(reading: OllamaReading, body: OllamaGenerateBody) -> None:
    """Read a prompt that no template renders."""
    reading.add_prompt(body.prompt or "")
    request = reading.request
    if body.suffix:
        request.prompts.suffix = body.suffix
    for index, image in enumerate(body.images or ()):
        reading.images.add(_data_url(image), f"images[{index}]")
        request.prompts.images.append(b"")


def _read_question(reading: OllamaReading, body: OllamaGenerateBody) -> None:
    """Read a prompt as the user's message of a conversation."""
    if body.context:
        if body.images:
            raise invalid("context", "context and images exclude each other; use /api/chat.")
        reading.context = body.context
    if body.system:
        system = reading.add_message(completion_pb2.ROLE_SYSTEM, "system")
        system.add_text(body.system, "system")
    user = reading.add_message(completion_pb2.ROLE_USER, "prompt")
    _add_images(user, body.images, "images")
    user.add_text(body.prompt or "", "prompt")
    _read_think(reading, body)
    if not (body.system or body.context or body.images or body.think):
        reading.bare_question = body.prompt


def _read_generation(
    body: OllamaGenerationBody, ignored: list[str], fields: JsonObject, form: Form
) -> OllamaReading:
    reading = OllamaReading(ignored, body)
    options = body.options or OllamaOptions()
    check_foreign([], fields.get("options") or {}, FOREIGN_OPTIONS)
    reading.is_streamed = body.stream is not False
    request = reading.request
    request.MergeFrom(
        completion_pb2.GenerateRequest(
            sampling=_sampling(options),
            stopping=_stopping(options),
            stop=[options.stop] if isinstance(options.stop, str) else options.stop,
            grammar=_grammar(body),
            drop_oldest_messages=body.truncate is not False,
            delivery=(
                completion_pb2.DELIVERY_DELTAS
                if reading.is_streamed
                else completion_pb2.DELIVERY_WHOLE
            ),
        )
    )
    if body.logprobs:
        request.logprobs = body.top_logprobs or 0
    reading.note_text("grammar.json_schema", "format")
    reading.writer = OllamaWriter(reading.named, form, logprobs=bool(body.logprobs))
    return reading


def _sampling(options: OllamaOptions) -> _Sampling:
    """Return the sampling of options, with Ollama's defaults."""
    sampling = _Sampling(
        seed=None if options.seed == -1 else options.seed,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        temperature=_TEMPERATURE if options.temperature is None else options.temperature,
    )
    last = _REPEAT_LAST_N if options.repeat_last_n is None else options.repeat_last_n
    if not -1 <= last <= _EVERYTHING:
        message = f"options.repeat_last_n must be between -1 and {_EVERYTHING}, got {last}."
        raise invalid("options.repeat_last_n", message)
    sampling.penalty_window = _EVERYTHING if last == -1 else last
    if options.mirostat:
        _read_mirostat(sampling, options)
        return sampling
    sampling.top_p = _TOP_P if options.top_p is None else options.top_p
    top_k = _TOP_K if options.top_k is None else max(0, options.top_k)
    sampling.top_k = min(top_k, _EVERYTHING)  # the services name the bound
    if options.min_p is not None:
        sampling.min_p = options.min_p
    return sampling


def _read_mirostat(sampling: _Sampling, options: OllamaOptions) -> None:
    """Read Mirostat 2, which replaces top_k, top_p and min_p. Raises INVALID_ARGUMENT."""
    if options.mirostat == 1:
        raise invalid("options.mirostat", "options.mirostat 1 is not supported; use 2, or omit it.")
    tau = _TAU if options.mirostat_tau is None else options.mirostat_tau
    if not 0 < tau <= 64:
        message = f"options.mirostat_tau must be above 0 and at most 64, got {tau}."
        raise invalid("options.mirostat_tau", message)
    eta = _ETA if options.mirostat_eta is None else options.mirostat_eta
    sampling.mirostat.target_perplexity = math.pow(2, tau)
    sampling.mirostat.learning_rate = eta


def _stopping(options: OllamaOptions) -> types_pb2.StoppingParams:
    stopping = types_pb2.StoppingParams(context_length=options.num_ctx)
    if options.num_predict is not None and options.num_predict > 0:
        stopping.max_tokens = min(options.num_predict, _EVERYTHING)
    return stopping


def _grammar(body: OllamaGenerationBody) -> types_pb2.GrammarSpec | None:
    match body.format:
        case None | "":
            return None
        case "json":
            return types_pb2.GrammarSpec(json_object=types_pb2.JsonObject())
        case str():
            shown = body.format[:64]
            raise invalid("format", f"format must be json or a JSON Schema, got {shown!r}.")
    return types_pb2.GrammarSpec(json_schema=json_text(closed_schema(body.format)))


def _read_think(reading: OllamaReading, body: OllamaGenerationBody) -> None:
    if body.think is None:
        return
    reading.must_reason = bool(body.think)
    conversation = reading.request.conversation
    if isinstance(body.think, str):
        conversation.reasoning_effort = body.think
        return
    switches = dict.fromkeys(("enable_thinking", "thinking"), body.think)
    conversation.template_arguments_json = msgspec.json.encode(switches).decode()


class _OpenCalls:
    """Calls that no message has answered yet. Clients may leave out the ids of calls."""

    def __init__(self) -> None:
        self._calls: deque[tuple[str, str]] = deque()
        """Id and name of each call, in order"""
        self._count = 0

    def add(self, given: str | None, name: str) -> str:
        """Add a call; return its id."""
        self._count += 1
        identity = given or f"call_{self._count}"
        self._calls.append((identity, name))
        return identity

    def answer(self, given: str | None, name: str | None) -> tuple[str, str]:
        """Return id and name of the call that a tool's message answers: the first that fits."""
        for call in self._calls:
            if (given or call[0]) == call[0] and (name or call[1]) == call[1]:
                self._calls.remove(call)
                return call
        return self.add_answered(given), name or ""

    def add_answered(self, given: str | None) -> str:
        """Return the id of a call that the conversation lacks."""
        self._count += 1
        return given or f"call_{self._count}"


def _read_message(
    reading: OllamaReading, message: OllamaMessage, name: str, calls: _OpenCalls
) -> None:
    role = _ROLES.get(message.role.lower())
    if role is None:
        known = ", ".join(_ROLES)
        raise invalid(f"{name}.role", f"{name}.role must be one of {known}.")
    made = reading.add_message(role, name)
    _add_images(made, message.images, f"{name}.images")
    if message.content or not message.tool_calls:
        made.add_text(message.content or "", f"{name}.content")
    made.message.reasoning = message.thinking or ""
    for index, call in enumerate(message.tool_calls or ()):
        function, place = call.function, f"{name}.tool_calls[{index}]"
        arguments = json_text({} if function.arguments is None else function.arguments)
        made.add_call(calls.add(call.id, function.name), function.name, arguments, place)
    if role == completion_pb2.ROLE_TOOL:
        identity, tool = calls.answer(message.tool_call_id, message.tool_name)
        made.message.tool_call_id, made.message.name = identity, tool


def _add_images(made: MessageReading, images: Sequence[str] | None, name: str) -> None:
    for index, image in enumerate(images or ()):
        made.add_image(_data_url(image), f"{name}[{index}]", f"{name}[{index}]")


def _data_url(image: str) -> str:
    """Return the data URL of base64; some clients send the URL itself."""
    return image if image[:5].lower() == "data:" else f"data:image/png;base64,{image}"


def _read_tool(reading: OllamaReading, tool: OllamaTool, index: int) -> None:
    if tool.type not in (None, "function"):
        raise invalid(f"tools[{index}].type", f"tools[{index}].type must be function.")
    path, name, function = f"tools[{index}]", f"tools[{index}].function", tool.function
    reading.rename(path, name)
    reading.note(f"{path}.parameters_json", f"{name}.parameters")
    reading.note_text(f"{path}.parameters_json", f"{name}.parameters")
    parameters = function.parameters
    reading.request.tools.add(
        name=function.name,
        description=function.description or "",
        parameters_json="" if parameters is None else json_text(parameters),
    )
