"""The version of Tokenwire in the files that name its images."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.manifests import ROOT, needs_kubectl

NAMES = re.compile(
    r"""(?x) image:[ ]tokenwire(?:/[\w-]+)?:(\S+)
    | name:[ ]tokenwire(?:/[\w-]+)?,[ ]newTag:[ ](\S+)\}
    | ARG[ ]VERSION=(\S+)
    | (?m:^(?:appVersion|version):[ ](\S+))"""
)
PATTERNS = (
    "docker-compose*.yml",
    "deploy/docker/Dockerfile",
    "deploy/kubernetes/**/kustomization.yaml",
    "deploy/helm/tokenwire/Chart.yaml",
)


def versions(root: Path) -> dict[str, set[str]]:
    """Return the versions of our images that each file below a root names."""
    files = [file for pattern in PATTERNS for file in root.glob(pattern)]
    found: dict[str, set[str]] = {}
    for file in files:
        groups = NAMES.findall(file.read_text())
        named = {version for group in groups for version in group if version}
        if named:
            found[str(file.relative_to(root))] = named
    return found


def test_all_files_name_images_of_this_version() -> None:
    """Otherwise a cluster starts other images than those that `make images` has built."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = versions(ROOT)
    assert len(found) >= 8
    assert set().union(*found.values()) == {project["version"]}


@needs_kubectl
def test_new_version_reaches_all_files(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    for file in (ROOT / "pyproject.toml", *ROOT.glob("docker-compose*.yml")):
        shutil.copy(file, tmp_path)
    command = [str(tmp_path / "deploy" / "set-version"), "12.3.4"]
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run(command, check=True, env=environment, timeout=120)
    found = versions(tmp_path)
    assert found.keys() == versions(ROOT).keys()
    assert set().union(*found.values()) == {"12.3.4"}
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["version"] == "12.3.4"
