"""Reading of a body: the request that it becomes, and where its client wrote each part of it."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.writer import Writer
from services.http_shim.documents.request_documents import RequestDocument, check_count
from services.http_shim.images.request_images import RequestImages
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2

__all__ = ["MessageReading", "Read", "Reading", "render_request"]

_INPUTS = ("conversation.", "prompts.")
_GROUPS = ("sampling.", "stopping.")


class Reading:
    """A request of the contract, made of the body of a client.

    Its images are apart from it, in the order of their empty places in the request. The texts of
    its documents are put in their places once they are read.
    """

    def __init__(self, ignored: list[str], names: Mapping[str, str]) -> None:
        """ignored: paths of the body's fields without effect.

        names: the dialect's names of the contract's fields, where they differ.
        """
        self.request = completion_pb2.GenerateRequest()
        self.images = RequestImages()
        self.documents: list[RequestDocument] = []
        self.ignored = ignored
        self.is_streamed = False
        self.priority: int | None = None
        """Priority in vLLM's order, lower first; None = that of the exchange"""
        self.timeout: float | None = None
        """Seconds after which the request fails; None = none"""
        self.keep_alive: float | None = None
        """Seconds that a model on demand stays in memory after the request; infinity = for ever,
        None = the default"""
        self._names = names
        self._noted: dict[str, str] = {}
        self._renamed: dict[str, str] = {}
        self._entries: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._writer: Writer | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes in memory until the model accepts the request."""
        return self.images.size

    @property
    def exempt_length(self) -> int:
        """Characters of the body that its limit does not count: the data URLs of its images."""
        return self.images.url_length

    @property
    def writer(self) -> Writer:
        """The writer of the answer. A request whose tokens are only counted has none."""
        assert self._writer is not None
        return self._writer

    @writer.setter
    def writer(self, writer: Writer) -> None:
        self._writer = writer

    def note(self, path: str, name: str) -> None:
        """Note the client's name of a field; paths that go further into the field have it too."""
        self._noted[path] = name

    def rename(self, path: str, name: str) -> None:
        """Note the client's name of a field; what follows in a path follows the name."""
        self._renamed[path] = name

    def note_entries(self, path: str, name: str) -> None:
        """Note the client's name of a map, whose entries the client names "name.key"."""
        self._entries[path] = name

    def note_text(self, path: str, name: str) -> None:
        """Note the client's name of a JSON text, within which paths name parts of a schema."""
        self._texts[path] = name

    def field(self, path: str) -> str:
        """Return the client's name of a field of the request, as errors have it."""
        for head, rest in _heads(path):
            if head in self._noted:
                return self._noted[head]
            if head in self._renamed:
                return self._renamed[head] + rest
            if head in self._entries and rest:
                return f"{self._entries[head]}.{rest.strip('[]')}"
            if head in self._names:
                return self._names[head]
        for prefix in _INPUTS + _GROUPS:
            path = path.removeprefix(prefix)
        return path.partition("[")[0].partition(".")[0]

    def place(self, path: str) -> str:
        """Return the client's path of a part of a schema, or of a message, that has no effect."""
        for head, rest in _heads(path):
            if head in self._texts:
                return self._texts[head] + rest
            if head in self._renamed:
                return self._renamed[head] + rest
            if head in self._noted:
                return self._noted[head]
        return self.field(path)

    def add_message(
        self, role: "completion_pb2.Role.ValueType", name: str, *, is_alike: bool = False
    ) -> "MessageReading":
        """Add a message without parts to the conversation; `name` is the client's.

        is_alike: whether the client's message has the contract's fields.
        """
        messages = self.request.conversation.messages
        path = f"conversation.messages[{len(messages)}]"
        (self.rename if is_alike else self.note)(path, name)
        return MessageReading(self, messages.add(role=role), path)


class MessageReading:
    """A message of the conversation that is read."""

    __slots__ = ("_path", "_reading", "message")

    def __init__(self, reading: Reading, message: completion_pb2.Message, path: str) -> None:
        self.message = message
        self._reading = reading
        self._path = path

    def note(self, field: str, name: str) -> None:
        """Note the client's name of a field of the message."""
        self._reading.note(f"{self._path}.{field}", name)

    def add_text(self, text: str, name: str) -> None:
        self._note_part(name)
        self.message.parts.add(text=text)

    def add_image(self, url: str, name: str, param: str) -> None:
        """Add an image. param: the client's name of its URL. Raises INVALID_ARGUMENT."""
        self._note_part(name)
        self._reading.images.add(url, param)
        self.message.parts.add(image=b"")

    def add_document(
        self, document: RequestDocument, name: str, text_of: Callable[[str], str] = str
    ) -> None:
        """Add a document, whose text is read later. text_of: makes the part's text of it.

        Raises INVALID_ARGUMENT for one document too many.
        """
        check_count(self._reading.documents, document.param)
        self._note_part(name)
        part = self.message.parts.add(text="")

        def put(text: str) -> None:
            part.text = text_of(text)
            document.data = b""  # the reading lives as long as the answer

        document.put = put
        self._reading.documents.append(document)

    def add_call(self, identity: str, name: str, arguments_json: str, place: str) -> str:
        """Add a call of a tool, which stands at `place`; return its path in the request."""
        path = f"{self._path}.tool_calls[{len(self.message.tool_calls)}]"
        self._reading.note(path, place)
        self.message.tool_calls.add(id=identity, name=name, arguments_json=arguments_json)
        return path

    def _note_part(self, name: str) -> None:
        self._reading.note(f"{self._path}.parts[{len(self.message.parts)}]", name)


Read: TypeAlias = Callable[[JsonObject], Reading]
"""Reads a body that is decoded to plain values. Raises INVALID_ARGUMENT with a client's name"""


def render_request(
    reading: Reading, model: str, *, with_texts: bool = False
) -> tokenizer_pb2.RenderChatRequest:
    """Return the request that renders what was read, with its images."""
    request = reading.request
    rendered = tokenizer_pb2.RenderChatRequest(
        model=model,
        conversation=request.conversation,
        tools=request.tools,
        tool_choice=request.tool_choice if request.HasField("tool_choice") else None,
        with_texts=with_texts,
    )
    reading.images.copy_into(rendered)
    return rendered


def _heads(path: str) -> "list[tuple[str, str]]":
    """Return each beginning of a path that ends with a whole step, and its rest, longest first."""
    ends = [len(path)] + [i for i in range(len(path) - 1, 0, -1) if path[i] in ".["]
    return [(path[:end], path[end:]) for end in ends]
