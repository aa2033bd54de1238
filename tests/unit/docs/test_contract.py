"""docs/contract.md names all that a gRPC client meets, and docs/api.md the shim's own codes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.options.v1 import bounds_pb2
from tokenwire.pb.orca.v1 import orca_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

ROOT = Path(__file__).resolve().parents[3]
CONTRACT = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
HTTP = (ROOT / "docs/api.md").read_text(encoding="utf-8")
FILES: list[FileDescriptor] = [
    completion_pb2.DESCRIPTOR,
    models_pb2.DESCRIPTOR,
    tokenizer_pb2.DESCRIPTOR,
    engine_pb2.DESCRIPTOR,
    grammar_pb2.DESCRIPTOR,
    jobs_pb2.DESCRIPTOR,
    types_pb2.DESCRIPTOR,
    bounds_pb2.DESCRIPTOR,
    orca_pb2.DESCRIPTOR,
]
SERVICES: list[ServiceDescriptor] = [
    service for file in FILES for service in file.services_by_name.values()
]
RAISING = re.compile(r"\b(ServiceError|invalid|Refused)\b")
"""Names with which a module makes an error"""
REASON = re.compile(r"[A-Z][A-Z_]{3,}")
NO_REASONS = {
    *("COMMIT", "DESC", "ROLLBACK"),  # SQL
    *("NAME", "OTHER", "TEXT"),  # parts of chat templates and tool calls
    *("PATH", "PYTHONPATH"),
    *("INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED"),  # codes of gRPC
    *("DELETE", "HEAD", "POST", "DRAFT_SOURCE_", "FINISH_REASON_", "UNKNOWN"),
}
"""Texts in capitals that modules with errors have beside their reasons"""


def modules(*folders: str) -> Iterator[Path]:
    return (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))


def reasons_in(source: str) -> set[str]:
    """Return the texts of a module that look like reasons, without exports."""
    exports = r"^__all__ = \[.*?\]$"
    tree = ast.parse(re.sub(exports, "", source, flags=re.MULTILINE | re.DOTALL))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and REASON.fullmatch(text)} - NO_REASONS


def reasons_of(files: Iterator[Path]) -> set[str]:
    sources = (file.read_text(encoding="utf-8") for file in files)
    return set().union(*(reasons_in(source) for source in sources if RAISING.search(source)))


def rows_of(service: ServiceDescriptor) -> dict[str, list[str]]:
    """Return the rows of a service's table by the name of the rpc."""
    table = re.search(rf"^\| `{service.name}` \| request .*?\n\n", CONTRACT, re.M | re.S)
    assert table is not None, service.name
    rows = [line.strip("|").split(" | ") for line in table[0].splitlines()[2:] if line]
    return {name.strip(" *`"): [cell.strip() for cell in cells] for name, *cells in rows}


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_contract_has_every_rpc_with_its_request_and_answer(service: ServiceDescriptor) -> None:
    rows = rows_of(service)
    assert set(rows) == {method.name for method in service.methods}
    for method in service.methods:
        request, answer, meaning = rows[method.name]
        for cell, message, streams in (
            (request, method.input_type, method.client_streaming),
            (answer, method.output_type, method.server_streaming),
        ):
            assert cell == f"{'stream of ' if streams else ''}`{message.name}`", method.full_name
        assert meaning, method.full_name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_contract_names_every_message_and_enum(file: FileDescriptor) -> None:
    named = set(re.findall(r"`(\w+)`", CONTRACT))
    assert {*file.message_types_by_name, *file.enum_types_by_name} <= named


def test_contract_names_every_reason_of_the_grpc_services_and_the_client() -> None:
    """A client decides by the reason whether it tries again."""
    client = (file for file in modules("tokenwire") if not {"pb", "cli"} & {*file.parts})
    services = modules("services/common", "services/engine", "services/grammar", "services/jobs")
    tokenizer = modules("services/tokenizer")
    raised = reasons_of(file for group in (client, services, tokenizer) for file in group)
    assert {"QUEUE_FULL", "KV_CACHE_TOO_SMALL", "NO_CHAT_TEMPLATE", "UNREACHABLE"} <= raised
    errors = CONTRACT.partition("\n## Errors\n")[2]
    assert raised <= set(re.findall(r"\b[A-Z_]{4,}\b", errors))


def test_contract_names_no_reason_that_is_gone() -> None:
    rows = CONTRACT.partition("| code | HTTP | reasons |")[2].partition("\n\n")[0]
    named = set(re.findall(r"\b[A-Z]{2,}_[A-Z_]+\b", rows)) - NO_REASONS
    sources = "".join(file.read_text() for file in modules("services", "tokenwire"))
    assert {name for name in named if name not in sources} == set()


def test_page_of_http_names_every_code_of_the_shim() -> None:
    table = set(re.findall(r"`([a-z_]+)`", HTTP.partition("\n## Errors\n")[2]))
    contract = {name.lower() for name in re.findall(r"\b[A-Z_]{4,}\b", CONTRACT)}
    raised = {name.lower() for name in reasons_of(modules("services/http_shim"))}
    assert {"malformed_json", "stopping"} <= raised
    assert raised <= table | contract
