"""Where the references of a JSON Schema lead."""

from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urldefrag, urljoin

from services.common.json_values import Json
from services.grammar.error import GrammarError
from services.grammar.schemas.json_schema import subschemas

__all__ = ["References"]


class References:
    """The subschemas of a document, by pointer, anchor and URI, and the paths of all its parts."""

    def __init__(self, root: Json, path: str = "$") -> None:
        self._root = root
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
        """The place of a part of the document; "$" for what is none."""
        return self._paths.get(id(schema), "$")

    def target(self, schema: Mapping[str, Json]) -> Json:
        """What the "$ref" of a part leads to; raises GrammarError where there is nothing."""
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise GrammarError(f"{self.path_of(schema)}.$ref must be a string.")
        base = self._bases.get(id(schema), "")
        resource, fragment = urldefrag(urljoin(base, reference) if base else reference)
        resource = resource or base
        if resource in self._resources:
            found = self._follow(self._resources[resource], resource, fragment)
            if found is not None:
                return found
        raise GrammarError(
            f'"{reference}" at {self.path_of(schema)}.$ref does not exist in the schema.'
        )

    def _follow(self, start: Json, base: str, fragment: str) -> Json:
        """None where there is nothing."""
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(f"{base}#{fragment}")
        found = start
        for part in fragment.split("/")[1:] if fragment.strip("/") else ():
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found


def _parts(
    value: Json, path: str, base: str, schemas: set[int], keyword: str
) -> Iterator[tuple[Mapping[str, Json], str, str]]:
    """All objects, with their paths and the URI that references in them start from."""
    if isinstance(value, Mapping):
        identifier = value.get(keyword)
        if id(value) not in schemas:
            identifier = None  # it only looks like one
        if isinstance(identifier, str) and identifier and not identifier.startswith("#"):
            base = urldefrag(urljoin(base, identifier))[0]
        yield value, path, base
        for key, member in value.items():
            if key not in ("enum", "const", "default", "examples"):
                yield from _parts(member, f"{path}.{key}", base, schemas, keyword)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _parts(member, f"{path}[{index}]", base, schemas, keyword)
