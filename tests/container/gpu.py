"""Tests of the image for GPUs on a machine without one. tests/container/run starts them.

Before its first kernel, Triton compiles a module that calls the GPU's driver, and loads it from its
cache. Here the driver is a library whose functions fail. All else is as on a GPU: the compiler and
the headers are the image's, and the container is confined as Compose and the manifests confine it.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.container.engine import VERSION, docker
from tests.container.manifests import MODEL, Cluster
from tests.manifests import ROOT, needs_kubectl, pods, rendered

IMAGE = f"tokenwire/engine-gpu:{VERSION}"
FILES = ("-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml")
DRIVER = """
import re, subprocess, sys
from pathlib import Path
import triton

source = Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c"
called = sorted(set(re.findall(r"\\b(cu[A-Z]\\w+)[(]", source.read_text())))
functions = "".join(f"int {name}(void) {{ return 100; }}\\n" for name in called)
command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-", "-o", sys.argv[1]]
subprocess.run(command, input=functions, text=True, check=True)
"""
"""Makes a library of the functions of a driver, none of which finds a GPU"""
LAUNCHER = """
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaUtils
from triton.compiler import ASTSource, compile
from tokenwire.services.engine.sampling.mask_kernel import _exclude

assert CudaUtils().launch
types = {"logits": "*fp32", "packed": "*i32", "width": "constexpr"}
types = {name: types.get(name, "i32") for name in _exclude.arg_names}
kernel = compile(ASTSource(_exclude, types, {"width": 1024}), target=GPUTarget("cuda", 90, 32))
print("launcher loaded,", len(kernel.asm["cubin"]), "bytes of kernel")
"""
"""Loads Triton's launcher, and compiles one of the engine's kernels to machine code"""
GPU_OVERLAYS = ("gpu", "tensor-parallel", "llm-d")

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("gpu_image")]


@pytest.fixture(scope="module")
def configuration(compose_program: tuple[str, ...]) -> dict[str, Any]:
    """Return the engine's service as Compose reads it from both files."""
    command = [*compose_program, *FILES, "config"]
    read = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    service: dict[str, Any] = yaml.safe_load(read.stdout)["services"]["engine"]
    return service


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory, gpu_image: None) -> Path:
    """Return a folder with a library in place of the GPU's driver."""
    folder = tmp_path_factory.mktemp("driver")
    for each in (folder.parent, folder):
        each.chmod(0o755)
    mount = f"--mount=type=bind,source={folder},destination=/driver"
    command = ("python", "-c", DRIVER, "/driver/libcuda.so.1")
    docker("run", "--rm", "--user=0", mount, "--entrypoint", command[0], IMAGE, *command[1:])
    return folder


@pytest.fixture
def kernels() -> Iterator[str]:
    """Return the name of an empty volume."""
    name = f"tokenwire-test-kernels-{os.getpid()}"
    docker("volume", "create", name)
    yield name
    docker("volume", "rm", "-f", name)


def launched(driver: Path, options: Sequence[str], image: str = IMAGE) -> tuple[int, str]:
    """Run LAUNCHER in a container without a network. Return its exit code, and what it said."""
    command = [
        *("docker", "run", "--rm", "--network=none", *options),
        f"--mount=type=bind,source={driver},destination=/driver,readonly",
        *("-e", "LD_LIBRARY_PATH=/driver", "-e", "TRITON_LIBCUDA_PATH=/driver"),
        *("--entrypoint", "python", image, "-c", LAUNCHER),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def confined(service: dict[str, Any], kernels: str) -> list[str]:
    """Return the options by which Compose runs a service, with a volume of the test."""
    options = ["--read-only"] if service["read_only"] else []
    options += [f"--tmpfs={path}" for path in service["tmpfs"]]
    options += [f"--cap-drop={name}" for name in service["cap_drop"]]
    options += [f"--security-opt={each}" for each in service["security_opt"]]
    for volume in service["volumes"]:
        if isinstance(volume, str):  # as docker-compose 1.29 writes it
            source, target, *_ = volume.split(":")
        else:
            source, target = volume["source"], volume["target"]
        if source == "kernels":
            options.append(f"--volume={kernels}:{target}")
    return options


def test_compose_reserves_a_gpu_for_the_engine(configuration: dict[str, Any]) -> None:
    [device] = configuration["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert configuration["image"] == IMAGE


def test_launcher_runs_in_the_container_of_compose(
    configuration: dict[str, Any], driver: Path, kernels: str
) -> None:
    """A second start needs no compiler: it finds the launcher in the volume."""
    options = confined(configuration, kernels)
    for more in ((), ("-e", "CC=/bin/false")):
        code, said = launched(driver, [*options, *more])
        assert code == 0, said
        assert "launcher loaded" in said


def test_launcher_of_a_cache_in_tmpfs_fails(
    configuration: dict[str, Any], driver: Path, kernels: str
) -> None:
    """The test above would see a cache from which nothing may be executed."""
    options = [*confined(configuration, kernels), "-e", "TRITON_CACHE_DIR=/tmp/triton"]
    code, said = launched(driver, options)
    assert code != 0
    assert "failed to map segment from shared object" in said


@needs_kubectl
@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_launcher_runs_in_the_pods_of_an_overlay(
    overlay: str, driver: Path, tmp_path: Path
) -> None:
    documents = rendered(overlay)
    found = [pod for _, pod in pods(documents)]
    for each in documents:
        if each["kind"] == "LeaderWorkerSet":
            templates = each["spec"]["leaderWorkerTemplate"]
            found += [templates["leaderTemplate"], templates["workerTemplate"]]
    engines = [
        (pod, container)
        for pod in found
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
        if container["name"] == "engine"
    ]
    assert engines
    (tmp_path / "peer-token").mkdir()
    for pod, container in engines:
        assert container["image"] == IMAGE
        user = pod["spec"]["securityContext"]["runAsUser"]
        mounts = Cluster(documents, tmp_path, "none", MODEL).mounts(pod["spec"], container)
        confinement = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
        code, said = launched(driver, [*confinement, f"--user={user}:{user}", *mounts])
        assert code == 0, said
