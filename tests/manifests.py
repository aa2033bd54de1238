"""Kubernetes manifests of deploy/kubernetes, as Kustomize renders them."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders it")


def rendered(overlay: str) -> list[dict[str, Any]]:
    return kustomized(KUBERNETES / "overlays" / overlay)


def kustomized(folder: Path) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return list(yaml.safe_load_all(output))


def with_components(folder: Path, overlay: str, *components: str) -> list[dict[str, Any]]:
    """Render an overlay of one's own in a folder, which adds components to one of ours."""

    def place(*parts: str) -> str:
        return os.path.relpath(KUBERNETES.joinpath(*parts), folder.resolve())

    customization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [place("overlays", overlay)],
        "components": [place("components", each) for each in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(customization))
    return kustomized(folder)


def pods(documents: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and pod of each Deployment and StatefulSet."""
    owners = [each for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    return [(each["metadata"]["name"], each["spec"]["template"]) for each in owners]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all containers of a pod, also those that run before and beside the others."""
    return [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
