"""gRPC reference: a Markdown page for each proto file, made of its descriptors and comments."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from tokenwire.pb.options.v1 import bounds_pb2

__all__ = ["pages"]

Place = tuple[int, ...]
"""Path of a declaration within its file, as `SourceCodeInfo.Location.path` gives it"""

_SYNTAX: Place = (FileDescriptorProto.SYNTAX_FIELD_NUMBER,)
_MESSAGES = FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
_ENUMS = FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER
_SERVICES = FileDescriptorProto.SERVICE_FIELD_NUMBER
_FIELDS = DescriptorProto.FIELD_FIELD_NUMBER
_ONEOFS = DescriptorProto.ONEOF_DECL_FIELD_NUMBER
_VALUES = EnumDescriptorProto.VALUE_FIELD_NUMBER
_METHODS = ServiceDescriptorProto.METHOD_FIELD_NUMBER
_CODE_OR_MARKUP = re.compile(r"(`[^`]*`)|([\\*_{}\[\]<>|#$~])")


def pages(protos: Path) -> dict[str, str]:
    """Return a page for each file below `protos`/tokenwire, by name: "completion" or "types"."""
    files = _descriptors(protos)
    return {Path(file.name).stem: _page(file) for file in files}


def _descriptors(protos: Path) -> Sequence[FileDescriptorProto]:
    found = find_spec("google.rpc.status_pb2")
    if found is None or found.origin is None:
        raise SystemExit("googleapis-common-protos is not installed: pip install '.[docs]'")
    roots = (protos, Path(protoc.__file__).parent / "_proto", Path(found.origin).parents[2])
    names = sorted(str(path) for path in protos.glob("tokenwire/**/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "descriptors")
        includes = [f"--proto_path={root}" for root in roots]
        options = [f"--descriptor_set_out={output}", "--include_source_info"]
        if protoc.main(["protoc", *includes, *options, *names]) != 0:
            raise SystemExit(f"protoc can't read the files below {protos}")
        return FileDescriptorSet.FromString(output.read_bytes()).file


def _page(file: FileDescriptorProto) -> str:
    comments = {
        tuple(location.path): location.leading_comments
        for location in file.source_code_info.location
    }
    lines = [f"# {file.package}", "", f"`{file.name}`", "", _prose(comments.get(_SYNTAX, ""))]
    for number, service in enumerate(file.service):
        lines += _service(file, service, (_SERVICES, number), comments)
    if file.message_type:
        lines += ["", "## Messages"]
    for number, message in enumerate(file.message_type):
        lines += _message(file, message, (_MESSAGES, number), comments)
    if file.enum_type:
        lines += ["", "## Enums"]
    for number, enum in enumerate(file.enum_type):
        lines += _enum(file, enum, (_ENUMS, number), comments)
    return "\n".join(lines) + "\n"


def _service(
    file: FileDescriptorProto,
    service: ServiceDescriptorProto,
    place: Place,
    comments: Mapping[Place, str],
) -> Iterator[str]:
    yield from _heading(file, service.name, "##")
    yield _prose(comments.get(place, ""))
    yield from ("", "| rpc | request | response | |", "|---|---|---|---|")
    for number, method in enumerate(service.method):
        request, response = _streams(method)
        meaning = _cell(comments.get((*place, _METHODS, number), ""))
        yield f"| `{method.name}` | {request} | {response} | {meaning} |"


def _streams(method: MethodDescriptorProto) -> tuple[str, str]:
    sides = (
        (method.client_streaming, method.input_type),
        (method.server_streaming, method.output_type),
    )
    request, response = (f"{'stream ' * streams}{_link(name)}" for streams, name in sides)
    return request, response


def _message(
    file: FileDescriptorProto,
    message: DescriptorProto,
    place: Place,
    comments: Mapping[Place, str],
) -> Iterator[str]:
    yield from _heading(file, message.name, "###")
    yield _prose(comments.get(place, ""))
    for number, oneof in enumerate(message.oneof_decl):
        if not oneof.name.startswith("_"):  # protoc's own, for a field that is `optional`
            comment = _cell(comments.get((*place, _ONEOFS, number), ""))
            yield from ("", f"- oneof `{oneof.name}`: {comment}")
    if message.field:
        yield from ("", "| field | type | number | |", "|---|---|---|---|")
    for number, field in enumerate(message.field):
        meaning = _cell(comments.get((*place, _FIELDS, number), "")) + _bounds(field)
        yield f"| `{field.name}` | {_type(message, field)} | {field.number} | {meaning} |"


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = next((each for each in message.nested_type if _is_map(each, field)), None)
    if entry is not None:
        key, value = (_type(entry, part) for part in entry.field)
        return f"map of {key} to {value}"
    name = _link(field.type_name) if field.type_name else _scalar(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, in oneof `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _bounds(field: FieldDescriptorProto) -> str:
    """Return the bounds of a field as the proto states them; empty without any."""
    bounds = field.options.Extensions[bounds_pb2.bounds]
    text = re.sub(r"\.0\b", "", text_format.MessageToString(bounds, as_one_line=True))
    return f" [Bounds](#{_label(bounds.DESCRIPTOR.full_name)}): `{text}`." if text else ""


def _is_map(nested: DescriptorProto, field: FieldDescriptorProto) -> bool:
    return nested.options.map_entry and field.type_name.endswith(f".{nested.name}")


def _scalar(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _enum(
    file: FileDescriptorProto,
    enum: EnumDescriptorProto,
    place: Place,
    comments: Mapping[Place, str],
) -> Iterator[str]:
    yield from _heading(file, enum.name, "###")
    yield _prose(comments.get(place, ""))
    yield from ("", "| value | number | |", "|---|---|---|")
    for number, value in enumerate(enum.value):
        meaning = _cell(comments.get((*place, _VALUES, number), ""))
        yield f"| `{value.name}` | {value.number} | {meaning} |"


def _heading(file: FileDescriptorProto, name: str, level: str) -> Iterator[str]:
    yield from ("", f"({_label(f'{file.package}.{name}')})=", f"{level} {name}", "")


def _link(type_name: str) -> str:
    """Return a link to a message or enum; those of other packages are only named."""
    full_name = type_name.removeprefix(".")
    if full_name.startswith("tokenwire."):
        return f"[{full_name.rpartition('.')[2]}](#{_label(full_name)})"
    return f"`{full_name}`"


def _label(full_name: str) -> str:
    """Return a label that Sphinx leaves as it is."""
    return full_name.lower().replace(".", "-").replace("_", "-")


def _cell(comment: str) -> str:
    return " ".join(_prose(comment).split())


def _prose(comment: str) -> str:
    """Return a comment as Markdown: code in backticks stays, all else is plain text."""
    lines = (line.removeprefix(" ").rstrip() for line in comment.splitlines())
    return _CODE_OR_MARKUP.sub(lambda found: found[1] or f"\\{found[2]}", "\n".join(lines)).strip()
