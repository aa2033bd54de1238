"""Annotations in JSON Schemas: formats and encodings that no grammar enforces."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice, starmap

from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = [
    "ENCODINGS",
    "ENFORCED_FORMATS",
    "LITERAL_KEYWORDS",
    "NAMED_SCHEMAS",
    "unenforced",
    "unenforced_in",
]

ENFORCED_FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
"""The formats that grammars enforce. JSON Schema treats all others as annotations."""

ENCODINGS = frozenset({"contentEncoding", "contentMediaType", "contentSchema"})
"""The keywords that describe the encoded content of a string; no grammar enforces them."""

LITERAL_KEYWORDS = frozenset({"const", "default", "enum", "examples"})
"""The keywords that hold values, not schemas"""

NAMED_SCHEMAS = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip
"""The keywords that hold an object of schemas by name"""

_MAX_PATHS = 100


def unenforced_in(spec: GrammarSpec, path: str) -> list[str]:
    """Return the paths of annotations in the schemas of a grammar at `path`, at most 100.

    Paths go through the grammar's fields, for example "grammar.json_schema.items.format".
    """
    schemas = _schemas_of(spec, f"{path}.{spec.WhichOneof('spec')}")
    return list(islice(chain.from_iterable(starmap(_annotations, schemas)), _MAX_PATHS))


def unenforced(schema: object, path: str) -> list[str]:
    """Return the paths of annotations in a schema at `path`, at most 100.

    These are unknown formats and encodings: keywords that read like constraints. The schema may be
    invalid; the grammar service refuses it later.
    """
    return list(islice(_annotations(schema, path), _MAX_PATHS))


def _schemas_of(spec: GrammarSpec, path: str) -> Iterator[tuple[object, str]]:
    """Yield the schemas of a grammar with their paths."""
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
                for keyword in ("json_schema", "json_value"):
                    yield part.get(keyword), f"{path}.grammars[{index}].{keyword}"


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
                elif keyword in NAMED_SCHEMAS and isinstance(content, dict):
                    inner += [(part, f"{where}.{name}") for name, part in content.items()]
                elif keyword not in LITERAL_KEYWORDS:
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
        return None  # the grammar service refuses it
    return value
