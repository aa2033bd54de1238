"""The list of an image's packages, which deploy/docker/sbom.py writes."""

import json
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

from tests.manifests import ROOT

SCHEMAS = files("cyclonedx.schema") / "_res"


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.SNAPSHOT.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def document() -> Any:
    folder = sysconfig.get_path("purelib")
    program = str(ROOT / "deploy" / "docker" / "sbom.py")
    command = [sys.executable, program, str(ROOT / "pyproject.toml"), folder]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)


def test_list_is_a_cyclonedx_document(document: Any) -> None:
    others = [schema(name) for name in ("spdx", "jsf-0.82")]
    registry: Registry[Any] = Registry().with_resources(
        [(each["$id"], Resource.from_contents(each)) for each in others]
    )
    jsonschema.Draft7Validator(schema("bom-1.6"), registry=registry).validate(document)


def test_list_names_each_installed_package_and_what_it_requires(document: Any) -> None:
    listed = {(each["name"], each["version"]) for each in document["components"]}
    installed = {
        (each.metadata["Name"], each.version)
        for each in distributions(path=[sysconfig.get_path("purelib")])
    }
    assert listed == {(name, version) for name, version in installed if name != "tokenwire"}
    graph = {each["ref"]: each["dependsOn"] for each in document["dependencies"]}
    [starlette] = [ref for ref in graph if ref.startswith("pkg:pypi/starlette@")]
    assert any(re.match("pkg:pypi/anyio@", ref) for ref in graph[starlette])
    assert all(ref in graph for needed in graph.values() for ref in needed)
