"""What a JSON Schema says of its values that no grammar enforces."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["ENCODINGS", "ENFORCED_FORMATS", "unenforced", "unenforced_in"]

ENFORCED_FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
"""Every other format is an annotation, as JSON Schema has it."""

ENCODINGS = frozenset({"contentEncoding", "contentMediaType", "contentSchema"})
"""The keywords that say what a string holds in other terms; annotations too."""

_LITERAL = frozenset({"const", "default", "enum", "examples"})  # keywords that hold no schemas
_NAMED = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip
_MOST = 100  # paths; it is what a client is told, not what the grammar rests on


def unenforced_in(spec: GrammarSpec, path: str) -> list[str]:
    """The same of a grammar at `path`, by its fields: "grammar.json_schema.items.format"."""
    schemas = _schemas_of(spec, f"{path}.{spec.WhichOneof('spec')}")
    return list(islice(chain.from_iterable(unenforced(*each) for each in schemas), _MOST))


def unenforced(schema: object, path: str) -> list[str]:
    """Paths of the keywords of a schema at `path`, and of all schemas in it, that only annotate
    though they sound as if they did not: unknown formats, and encodings. At most 100.

    Whether it is a schema at all, the grammar service says.
    """
    return list(islice(_annotations(schema, path), _MOST))


def _schemas_of(spec: GrammarSpec, path: str) -> Iterator[tuple[object, str]]:
    """The schemas of a grammar, with their paths."""
    kind = spec.WhichOneof("spec")
    if kind == "json_schema":
        yield _read(spec.json_schema), path
    elif kind == "structural_tag":
        for index, structure in enumerate(spec.structural_tag.structures):
            yield _read(structure.schema), f"{path}.structures[{index}].schema"
    elif kind == "llguidance":
        grammar = _read(spec.llguidance)
        parts = grammar.get("grammars") if isinstance(grammar, dict) else None
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                yield part.get("json_schema"), f"{path}.grammars[{index}].json_schema"


def _annotations(schema: object, path: str) -> Iterator[str]:
    pending: list[tuple[object, str]] = [(schema, path)]
    while pending:
        value, at = pending.pop()
        inner: list[tuple[object, str]] = []
        if isinstance(value, dict):
            for keyword, content in value.items():
                where = f"{at}.{keyword}"
                if keyword == "format" and isinstance(content, str):
                    if content not in ENFORCED_FORMATS:
                        yield where
                elif keyword in ENCODINGS:
                    yield where
                elif keyword in _NAMED and isinstance(content, dict):
                    inner += [(part, f"{where}.{name}") for name, part in content.items()]
                elif keyword not in _LITERAL:
                    inner.append((content, where))
        elif isinstance(value, list):
            inner = [(part, f"{at}[{index}]") for index, part in enumerate(_schemas(value))]
        pending += reversed(inner)


def _schemas(values: Sequence[object]) -> Sequence[object]:
    return values if any(isinstance(value, dict) for value in values) else ()


def _read(text: str) -> object:
    if not any(f'"{keyword}"' in text for keyword in ("format", *ENCODINGS)):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None  # which the grammar service refuses
    return value
