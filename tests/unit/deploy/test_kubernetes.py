"""The Kubernetes manifests: a cluster accepts them, and their parts fit together."""

import dataclasses
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.engine.settings import EngineSettings
from services.http_shim.settings import HttpShimSettings
from services.tokenizer.application import TokenizerSettings

ROOT = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
CUSTOM_KINDS = {"LeaderWorkerSet"}
"""Kinds that Kubernetes itself does not have"""
SETTINGS = {
    "engine": EngineSettings,
    "tokenizer": TokenizerSettings,
    "http-shim": HttpShimSettings,
}

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders it")


def rendered(overlay: str) -> list[dict[str, Any]]:
    folder = str(ROOT / "overlays" / overlay)
    command = ["kubectl", "kustomize", folder]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return list(yaml.safe_load_all(output))


def pods(documents: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and pod of each Deployment and StatefulSet."""
    owners = [each for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    return [(each["metadata"]["name"], each["spec"]["template"]) for each in owners]


@pytest.mark.parametrize("file", sorted((ROOT / "base").glob("[!k]*.yaml")), ids=lambda f: f.stem)
def test_cluster_accepts_the_base(file: Path) -> None:
    for document in yaml.safe_load_all(file.read_text()):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_cluster_accepts_each_overlay(overlay: str) -> None:
    documents = rendered(overlay)
    assert {"Namespace", "Service", "Deployment", "NetworkPolicy"} <= {d["kind"] for d in documents}
    for document in documents:
        assert document["metadata"].get("namespace", "tokenwire") == "tokenwire"
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(
                document, kubernetes_validate.latest_version(), strict=True
            )


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_restricted_and_reachable_by_its_service(overlay: str) -> None:
    documents = rendered(overlay)
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    for name, pod in pods(documents):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
        for container in containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
        selector = services[name]["selector"].items()
        assert selector <= pod["metadata"]["labels"].items()
        [container] = pod["spec"]["containers"]
        offered = {port["containerPort"] for port in container["ports"]}
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        for port in services[name]["ports"]:
            target = port.get("targetPort", port["port"])
            assert named.get(target, target) in offered


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_know_their_flags_and_stop_before_they_are_killed(overlay: str) -> None:
    for name, pod in pods(rendered(overlay)):
        [container] = pod["spec"]["containers"]
        flags = dict(arg.lstrip("-").partition("=")[::2] for arg in container["args"])
        if settings := SETTINGS.get(name):
            known = {field.name for field in dataclasses.fields(settings)}
            assert {flag.replace("-", "_") for flag in flags} <= known
        before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert int(flags["grace"]) + before < pod["spec"]["terminationGracePeriodSeconds"]
