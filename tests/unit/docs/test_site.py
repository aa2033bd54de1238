"""Tests of the site that Sphinx makes of docs/, and of its gRPC reference."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

from docs import grpc_reference
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.options.v1 import bounds_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

ROOT = Path(__file__).resolve().parents[3]
FILES: list[FileDescriptor] = [
    completion_pb2.DESCRIPTOR,
    models_pb2.DESCRIPTOR,
    engine_pb2.DESCRIPTOR,
    grammar_pb2.DESCRIPTOR,
    tokenizer_pb2.DESCRIPTOR,
    types_pb2.DESCRIPTOR,
    bounds_pb2.DESCRIPTOR,
]


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return grpc_reference.pages(ROOT / "protos")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a warning, such as that of a link that leads nowhere, fails its build."""
    target = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*build, "-d", str(target / "doctrees"), str(ROOT / "docs"), str(target / "html")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target / "html"


def rows(section: str) -> dict[str, list[str]]:
    """Return the rows of a section's tables by the name in their first column."""
    cells = [
        line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")
    ]
    return {first.strip(" `"): [cell.strip() for cell in rest] for first, *rest in cells}


def section(page: str, name: str) -> str:
    found = re.search(rf"^##+ {name}$(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def fields_are_listed(page: str, message: Descriptor) -> None:
    listed = rows(section(page, message.name))
    assert list(listed) == [field.name for field in message.fields]
    for field in message.fields:
        kind, number, meaning = listed[field.name]
        assert int(number) == field.number
        assert meaning, field.full_name
        assert ("repeated" in kind or "map of" in kind) == field.is_repeated


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_reference_has_every_rpc_message_field_and_value_with_its_comment(
    reference: dict[str, str], file: FileDescriptor
) -> None:
    """A client's author reads the reference instead of the sources."""
    page = reference[Path(file.name).stem]
    for service in file.services_by_name.values():
        listed = rows(section(page, service.name))
        assert set(listed) == {method.name for method in service.methods}
        for request, response, meaning in listed.values():
            assert "](#" in request
            assert "](#" in response
            assert meaning
    for message in file.message_types_by_name.values():
        fields_are_listed(page, message)
    for enum in file.enum_types_by_name.values():
        listed = rows(section(page, enum.name))
        assert list(listed) == [value.name for value in enum.values]
        assert all(meaning for _, meaning in listed.values())


def test_reference_shows_streams_oneofs_maps_and_optional_fields(
    reference: dict[str, str],
) -> None:
    completion, types = reference["completion"], reference["types"]
    session = rows(section(completion, "CompletionService"))["Session"]
    assert all(side.startswith("stream ") for side in session[:2])
    assert rows(section(completion, "Prompt"))["text"][0] == "string, in oneof `prompt`"
    sampling = rows(section(types, "SamplingParams"))
    assert sampling["logit_bias"][0] == "map of uint32 to float"
    assert sampling["temperature"][0] == "optional float"


def test_reference_shows_the_bounds_of_a_field(reference: dict[str, str]) -> None:
    _, _, meaning = rows(section(reference["types"], "SamplingParams"))["repetition_penalty"]
    assert meaning.endswith("[Bounds](#tokenwire-options-v1-bounds): `most: 2 above: 0`.")


def test_comments_of_the_protos_are_plain_text_in_the_site(site: Path) -> None:
    page = (site / "generated/grpc/completion.html").read_text(encoding="utf-8")
    assert '`pattern: "[A-Za-z0-9_-]{1,128}"`'.strip("`") in html.unescape(
        re.sub("<[^>]*>", "", page)
    )


def test_every_link_of_the_site_leads_to_a_file_and_a_heading(site: Path) -> None:
    """Sphinx checks the links that it makes; this also checks those of the theme and our own."""
    targets = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert site / "index.html" in targets
    for page, text in targets.items():
        for link in re.findall(r'<a [^>]*href="([^"]*)"', text):
            path, _, anchor = html.unescape(link).partition("#")
            if "://" in path:
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, link)
            if anchor and target in targets:
                assert f'id="{anchor}"' in targets[target], (page, link)
