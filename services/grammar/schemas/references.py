"""The targets of the references in a JSON Schema."""

from collections.abc import Iterator, Mapping
from urllib.parse import urldefrag, urljoin

from services.common.annotations import LITERAL_KEYWORDS
from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.subschemas import resolve_pointer, subschemas

__all__ = ["References"]


class References:
    """The subschemas of a document by pointer, anchor and URI, and the paths of all its parts."""

    def __init__(self, root: Json, path: str = "$") -> None:
        self._paths: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Json] = {"": root}
        self._anchors: dict[str, Json] = {}
        schemas = {id(schema) for schema, _ in subschemas(root, path)}
        draft = str(root.get("$schema")) if isinstance(root, Mapping) else ""
        keyword = "id" if "draft-03" in draft or "draft-04" in draft else "$id"
        for part, where, base in _parts(root, path, "", schemas, keyword):
            self._paths[id(part)] = where
            self._bases[id(part)] = base
            if id(part) not in schemas:
                continue
            if base not in self._resources:
                self._resources[base] = part
            if isinstance(name := part.get("$anchor"), str):
                self._anchors[f"{base}#{name}"] = part
            if isinstance(name := part.get(keyword), str) and name.startswith("#"):
                self._anchors[f"{base}{name}"] = part

    def path_of(self, schema: Json) -> str:
        """Return the path of a part of the document, "$" for anything else."""
        return self._paths.get(id(schema), "$")

    def target(self, schema: Mapping[str, Json]) -> Json:
        """Return the target of a schema's "$ref"; raise GrammarError where there is none."""
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise GrammarError(f"{self.path_of(schema)}.$ref must be a string.")
        base = self._bases.get(id(schema), "")
        resource, fragment = urldefrag(urljoin(base, reference) if base else reference)
        found = self._find(resource or base, fragment)
        if found is None:
            raise GrammarError(
                f'"{reference}" at {self.path_of(schema)}.$ref does not exist in the schema.'
            )
        return found

    def _find(self, resource: str, fragment: str) -> Json:
        if resource not in self._resources:
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(f"{resource}#{fragment}")
        found = resolve_pointer(self._resources[resource], fragment)
        return None if found is None else found[0]


def _parts(
    value: Json, path: str, base: str, schemas: set[int], keyword: str
) -> Iterator[tuple[Mapping[str, Json], str, str]]:
    """Yield all objects with their paths and base URIs."""
    if isinstance(value, Mapping):
        # outside schemas, the keyword is the name of some member
        identifier = value.get(keyword) if id(value) in schemas else None
        if isinstance(identifier, str) and identifier and not identifier.startswith("#"):
            base = urldefrag(urljoin(base, identifier))[0]
        yield value, path, base
        for key, member in value.items():
            if key not in LITERAL_KEYWORDS:
                yield from _parts(member, f"{path}.{key}", base, schemas, keyword)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _parts(member, f"{path}[{index}]", base, schemas, keyword)
