"""API reference: the OpenAPI document as an HTML page."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

__all__ = ["reference"]

Json = Mapping[str, Any]

_BOUNDS = {
    "from": ("minimum", "minLength", "minItems"),
    "above": ("exclusiveMinimum",),
    "to": ("maximum", "maxLength", "maxItems"),
}
_NO_BOUND = 2**31
_ADDRESS = "http://127.0.0.1:8000"
"""Address in the examples, which the page's script replaces by its own"""


def reference(document: Json) -> bytes:
    """Return the HTML page, with the text of the document escaped."""
    root = Element("html", lang="en")
    head = SubElement(root, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "title", f"{document['info']['title']} API")
    SubElement(head, "link", rel="icon", href="data:,")
    SubElement(head, "link", rel="stylesheet", href="style.css")
    SubElement(head, "link", rel="stylesheet", href="reference/reference.css")
    SubElement(head, "script", type="module", src="reference/main.js")
    body = SubElement(root, "body")
    header = SubElement(body, "header")
    _add(header, "h1", f"{document['info']['title']} {document['info']['version']}")
    links = SubElement(header, "nav", attrib={"aria-label": "Pages"})
    _add(links, "a", "Playground", href=".")
    _add(links, "a", "API reference", href="docs", **{"aria-current": "page"})
    _add(links, "a", "Status", href="status")
    _add(links, "a", "Admin", href="admin")
    _add(links, "a", "openapi.json", href="openapi.json")
    main = SubElement(body, "main", attrib={"class": "reference"})
    _add(main, "p", document["info"]["description"])
    operations = list(_operations(document))
    contents = SubElement(main, "ul", attrib={"class": "contents"})
    for method, paths, operation in operations:
        _add_link(SubElement(contents, "li"), operation["operationId"], f"{method} {paths[0]}")
    for method, paths, operation in operations:
        _add_operation(main, method, paths, operation)
    components = document["components"]
    _add_meanings(main, "Errors", components["responses"])
    _add_meanings(main, "Headers", components["headers"])
    _add(main, "h2", "Types")
    for name, schema in components["schemas"].items():
        _add(main, "h3", name, id=name)
        _add(main, "p", schema.get("description", ""))
        _add_fields(main, schema)
    page: str = tostring(root, method="html", encoding="unicode")
    return f"<!doctype html>\n{page}\n".encode()


def _operations(document: Json) -> Iterator[tuple[str, Sequence[str], Json]]:
    """Yield each operation with its method and all of its paths."""
    alike: dict[tuple[str, str], list[tuple[str, Json]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            alike.setdefault((method, operation["summary"]), []).append((path, operation))
    for (method, _), found in alike.items():
        yield method.upper(), [path for path, _ in found], found[0][1]


def _add_operation(main: Element, method: str, paths: Sequence[str], operation: Json) -> None:
    _add(main, "h2", f"{method} {paths[0]}", id=operation["operationId"])
    parameters = operation.get("parameters", ())
    aliases = "".join(f" Also at {path}." for path in paths[1:])
    _add(main, "p", operation["summary"] + aliases)
    for parameter in parameters:
        line = _add(main, "p", f"In the {parameter['in']}: ")
        _add(line, "code", parameter["name"])
    content = operation.get("requestBody", {"content": {}})["content"].get("application/json")
    _add_example(main, method, paths[0], content and content["example"], parameters)
    if content:
        _add_type(_add(main, "p", "Body: "), content["schema"])
    responses = dict(operation["responses"])
    answer = responses.pop("200")
    for media, content in answer["content"].items():
        line = _add(main, "p", f"Answer, {media}: ")
        _add_type(line, content["schema"])
        if "description" in content["schema"]:
            _add_text(line, f". {content['schema']['description']}")
    _add_links(main, "Headers: ", answer["headers"])
    if responses:
        _add_links(main, "Errors: ", sorted(responses))


def _add_meanings(main: Element, title: str, meanings: Json) -> None:
    _add(main, "h2", title)
    table = SubElement(main, "table")
    for name, described in meanings.items():
        row = SubElement(table, "tr", id=name)
        _add(row, "td", name)
        _add(row, "td", described["description"])


def _add_example(
    main: Element, method: str, path: str, body: Json | None, parameters: Sequence[Json]
) -> None:
    """Add a command, from whose attributes the page's script makes a form."""
    names = [each["name"] for each in parameters if each["in"] in ("path", "query")]
    attributes = {"data-method": method, "data-path": path, "data-parameters": " ".join(names)}
    if body is not None:
        attributes["data-body"] = json.dumps(body, indent=2)
    _add(main, "pre", _curl(method, path, body), **attributes)


def _curl(method: str, path: str, body: Json | None) -> str:
    is_default = method == ("GET" if body is None else "POST")
    option = "" if is_default else f"-X {method} "
    command = f"curl {option}'{_ADDRESS}{path}'"
    if body is None:
        return command
    return f"{command} \\\n  -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _add_fields(main: Element, schema: Json) -> None:
    table = SubElement(main, "table")
    required = schema.get("required", ())
    fields = schema["properties"]
    for name, field in sorted(fields.items(), key=lambda each: each[0] not in required):
        row = SubElement(table, "tr")
        _add(SubElement(row, "td"), "code", name)
        cell = SubElement(row, "td")
        _add_type(cell, field)
        default = field.get("default")
        if name in required:
            _add_text(cell, ", required")
        elif default is not None:
            _add_text(cell, f", default {json.dumps(default)}")
        _add(row, "td", field.get("description", ""))


def _add_type(parent: Element, schema: Json) -> None:
    """Describe a type in a few words, with links to named types."""
    match schema:
        case {"$ref": reference_}:
            name = reference_.rpartition("/")[2]
            _add_link(parent, name, name)
        case {"anyOf": options}:
            for number, option in enumerate(options):
                _add_text(parent, " or " if number else "")
                _add_type(parent, option)
        case {"enum": values}:
            _add_text(parent, " or ".join(map(json.dumps, values)))
        case {"type": "array", "items": items}:
            _add_text(parent, "array of (" if "anyOf" in items else "array of ")
            _add_type(parent, items)
            _add_text(parent, (")" if "anyOf" in items else "") + _bounds(schema))
        case {"type": "object", "additionalProperties": values} if values:
            _add_text(parent, "object of ")
            _add_type(parent, values)
        case {"type": str(name)}:
            _add_text(parent, name + _bounds(schema))
        case _:
            _add_text(parent, "anything")


def _bounds(schema: Json) -> str:
    """Return the bounds of a number or a length; limits of integer types are omitted."""
    ends = {
        sign: schema[keyword]
        for sign, keywords in _BOUNDS.items()
        for keyword in keywords
        if abs(schema.get(keyword, _NO_BOUND)) < _NO_BOUND
    }
    words = [f"{sign} {end}" for sign, end in ends.items()]
    if list(ends) == ["to"]:
        words.insert(0, "up")
    if "pattern" in schema:
        words.append(f"like {schema['pattern']}")
    unit = {"string": " characters", "array": " items"}.get(schema["type"], "") if ends else ""
    return f" ({' '.join(words)}{unit})" if words else ""


def _add(parent: Element, tag: str, text: str, **attributes: str) -> Element:
    element = SubElement(parent, tag, attributes)
    element.text = text
    return element


def _add_link(parent: Element, target: str, text: str) -> None:
    _add(parent, "a", text, href=f"#{target}")


def _add_links(parent: Element, title: str, targets: Iterable[str]) -> None:
    line = _add(parent, "p", title)
    for number, target in enumerate(targets):
        _add_text(line, ", " if number else "")
        _add_link(line, target, target)


def _add_text(parent: Element, text: str) -> None:
    """Append text to the content of an element."""
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text
