"""The OpenAPI document is valid and matches the routes and the parser."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from services import http_shim
from services.common.accounts.ledger import UsageLedger
from services.http_shim.app import create_app
from services.http_shim.backends.backend import BackendSettings
from services.http_shim.backends.catalog import Catalog
from services.http_shim.backends.status_history import StatusHistory
from services.http_shim.dialects import tools
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.chat import types as chats
from services.http_shim.dialects.completions import types as completions
from services.http_shim.dialects.messages import types as messages
from services.http_shim.dialects.ollama import types as ollama_types
from services.http_shim.dialects.responses import types as responses
from services.http_shim.documentation.openapi import document, openapi
from services.http_shim.documentation.pages import PAGES
from services.http_shim.endpoints import (
    adapters,
    batches,
    model_loading,
    multi_completion,
    tokenization,
)
from services.http_shim.http.gate import Gate
from services.http_shim.jobs.jobs_client import JobsClient
from services.http_shim.ollama import embeddings as ollama_embeddings
from services.http_shim.ollama import models as ollama_models
from services.http_shim.ollama import pulls as ollama_pulls
from services.http_shim.settings import HttpShimSettings
from services.http_shim.vectors import embeddings, rankings

DOCUMENT = document()


def test_document_is_valid() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_page_for_language_models_names_every_route_that_takes_a_body() -> None:
    """A program that reads /llms.txt alone finds the API that it needs."""
    page = (Path(http_shim.__file__).parent / "web" / "llms.txt").read_text()
    paths = {path for path, methods in DOCUMENT["paths"].items() if "post" in methods}
    routes = {path for path in paths if "{" not in path and f"/v1{path}" not in paths}
    assert {"/v1/messages", "/v1/batches", "/tokenize"} <= routes
    assert [route for route in routes if f"`POST {route}`" not in page] == []


async def test_document_is_served_unchanged() -> None:
    response = await openapi(document())(None)  # type: ignore[arg-type]  # the request is unused
    assert json.loads(bytes(response.body)) == json.loads(json.dumps(DOCUMENT))


async def test_document_has_every_route(tmp_path: Path) -> None:
    path = tmp_path / "catalog.toml"
    path.write_text('[[models]]\nid = "m"\nplaceholder = true')
    catalog, settings = Catalog(path, BackendSettings()), HttpShimSettings(ollama=True)
    app = create_app(
        catalog, Gate(), settings, None, JobsClient(""), UsageLedger(), StatusHistory(catalog)
    )
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
        if "application/json" in operation.get("requestBody", {}).get("content", ())
    ]
    return [
        (content["schema"]["$ref"].rpartition("/")[2], content["example"]) for content in contents
    ]


@pytest.mark.parametrize(("name", "example"), bodies())
def test_parser_accepts_the_examples(name: str, example: dict[str, object]) -> None:
    modules = (
        *(completions, chats, messages, responses),
        *(tokenization, adapters, batches, multi_completion, rankings, embeddings),
        *(ollama_types, ollama_embeddings, ollama_models, ollama_pulls),
        model_loading,
    )
    body = next(getattr(module, name) for module in modules if hasattr(module, name))
    _, ignored = body_of(body, example)
    assert ignored == []
    assert set(DOCUMENT["components"]["schemas"][name].get("required", ())) <= set(example)


def test_fields_have_ranges_and_descriptions() -> None:
    fields = DOCUMENT["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert fields["top_k"]["anyOf"][0] == {"type": "integer", "minimum": -1, "maximum": 128}
    assert {"type": "null"} not in fields["prompt"]["anyOf"]
    assert all(field["description"] for field in fields.values())


FUNCTION = {"function": {"name": "f"}}
CUSTOM = {"type": "custom", "custom": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION, CUSTOM]}}


def is_parsed(name: str, value: object) -> bool:
    try:
        msgspec.convert(value, getattr(tools, name))
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Tool", [FUNCTION, CUSTOM]),
        ("ToolReference", [FUNCTION, CUSTOM]),
        ("NamedToolChoice", [FUNCTION, CUSTOM, ALLOWED]),
        (
            "MessageCall",
            [
                {"id": "1", "function": {"name": "f", "arguments": "{}"}},
                {"id": "1", "type": "custom", "custom": {"name": "f", "input": ""}},
            ],
        ),
    ],
)
def test_type_names_the_field_of_a_tool(name: str, values: list[dict[str, object]]) -> None:
    """A generated client must not refuse what the server accepts: functions need no type."""
    schema = jsonschema.Draft202012Validator(DOCUMENT | {"$ref": f"#/components/schemas/{name}"})
    function, custom, *_ = values
    everything = {name: value for each in values for name, value in each.items()}
    nulls = dict.fromkeys(everything.keys() - {"id", "type"})
    taken = [*values, *(nulls | each for each in values), function | {"type": "function"}]
    refused = [
        everything | {"type": "function"},
        everything | {"type": "custom"},
        function | {"type": "custom"},
        custom | {"type": "function"},
        nulls | {"id": "1"},
        *(each | {"type": "x"} for each in values),
    ]
    for value in taken:
        assert (schema.is_valid(value), is_parsed(name, value)) == (True, True), value
    for value in refused:
        assert (schema.is_valid(value), is_parsed(name, value)) == (False, False), value


def test_streams_have_the_schema_of_their_chunks() -> None:
    for path, chunk in (
        ("/v1/completions", "Completion"),
        ("/v1/chat/completions", "ChatCompletionChunk"),
    ):
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        schema = content["text/event-stream"]["schema"]
        assert schema["$ref"] == f"#/components/schemas/{chunk}"
