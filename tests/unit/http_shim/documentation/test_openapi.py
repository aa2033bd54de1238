"""The OpenAPI document is valid and matches the routes and the parser."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from services.http_shim.app import create_app
from services.http_shim.backends.backend import RetryPolicy
from services.http_shim.backends.catalog import Catalog
from services.http_shim.documentation.openapi import document, openapi
from services.http_shim.documentation.pages import PAGES
from services.http_shim.formats import chat_messages, request_bodies
from services.http_shim.formats.anthropic import message_requests
from services.http_shim.formats.openai_responses import response_requests
from services.http_shim.http.gate import Gate
from services.http_shim.settings import HttpShimSettings

DOCUMENT = document()


def test_document_is_valid() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()


async def test_document_is_served_unchanged() -> None:
    response = await openapi(None)  # type: ignore[arg-type]  # the request is unused
    assert json.loads(bytes(response.body)) == json.loads(json.dumps(DOCUMENT))


async def test_document_has_every_route(tmp_path: Path) -> None:
    path = tmp_path / "catalog.toml"
    path.write_text('[[models]]\nid = "m"\nplaceholder = true')
    app = create_app(Catalog(path, RetryPolicy()), Gate(), HttpShimSettings(), None)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {(path, method) for path, item in DOCUMENT["paths"].items() for method in item}
    assert routes == documented | {(path, "get") for path in PAGES}


def bodies() -> list[tuple[str, Any]]:
    contents = [
        operation["requestBody"]["content"]["application/json"]
        for item in DOCUMENT["paths"].values()
        for operation in item.values()
        if "requestBody" in operation
    ]
    return [
        (content["schema"]["$ref"].rpartition("/")[2], content["example"]) for content in contents
    ]


@pytest.mark.parametrize(("name", "example"), bodies())
def test_parser_accepts_the_examples(name: str, example: dict[str, object]) -> None:
    modules = (request_bodies, message_requests, response_requests)
    body = next(getattr(module, name) for module in modules if hasattr(module, name))
    decoder = msgspec.json.Decoder(body)
    _, ignored = request_bodies.parse(decoder, json.dumps(example).encode())
    assert ignored == []
    assert set(DOCUMENT["components"]["schemas"][name].get("required", ())) <= set(example)


def test_fields_have_ranges_and_descriptions() -> None:
    fields = DOCUMENT["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert fields["top_k"]["anyOf"][0] == {"type": "integer", "minimum": -1, "maximum": 128}
    assert {"type": "null"} not in fields["prompt"]["anyOf"]
    assert all(field["description"] for field in fields.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FunctionTool", {"function": {"name": "f"}}),
        ("NamedToolChoice", {"function": {"name": "f"}}),
        ("MessageCall", {"id": "1", "function": {"name": "f", "arguments": "{}"}}),
    ],
)
def test_type_is_optional_where_the_parser_does_not_need_it(
    name: str, value: dict[str, object]
) -> None:
    """Otherwise a generated client would refuse what the server accepts."""
    kind = getattr(request_bodies, name, None) or getattr(chat_messages, name)
    msgspec.json.decode(json.dumps(value), type=kind)
    jsonschema.validate(value, DOCUMENT | {"$ref": f"#/components/schemas/{name}"})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            value | {"type": "x"}, DOCUMENT | {"$ref": f"#/components/schemas/{name}"}
        )


def test_streams_have_the_schema_of_their_chunks() -> None:
    for path, chunk in (
        ("/v1/completions", "Completion"),
        ("/v1/chat/completions", "ChatCompletionChunk"),
    ):
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        schema = content["text/event-stream"]["schema"]
        assert schema["$ref"] == f"#/components/schemas/{chunk}"
