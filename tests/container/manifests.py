"""Tests that run the commands of deploy/kubernetes in the images, as a kubelet would.

The commands, variables, volumes, users and probes are those of the manifests as Kustomize renders
them. A claim of a volume is the embedded model, an empty folder is a tmpfs, a Service is a name in
Docker's network. There is no GPU here and little memory: the engines get flags for that besides
their own.
"""

import os
import re
import subprocess
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.common.accounts.key_file import add_key
from tests.container.engine import START_SECONDS, docker, logs
from tests.container.images import completion
from tests.manifests import OVERLAYS, ROOT, needs_kubectl, pods, rendered, with_components
from tests.unit.common.model_files.hub_server import Hub, running_hub

MODEL = ROOT / "models" / "tokenwire-code-6m"
SMALL = ("--kv-memory=256MiB", "--device=cpu", "--threads=1")
"""Flags of an engine that override those for large machines"""
LEADER = {
    "LWS_GROUP_SIZE": "1",
    "LWS_WORKER_INDEX": "0",
    "LWS_LEADER_ADDRESS": "127.0.0.1",
}
"""Variables that LeaderWorkerSet gives the leader of a group of one"""
PROBE = """
import sys, urllib.request
kind, port, what = sys.argv[1:]
if kind == "httpGet":
    urllib.request.urlopen(f"http://127.0.0.1:{port}{what}", timeout=5)
else:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=what), timeout=5)
    sys.exit(answer.status != health_pb2.HealthCheckResponse.SERVING)
"""

pytestmark = [
    needs_kubectl,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("images", "gpu_image"),
]


@dataclass(slots=True)
class Cluster:
    """Pods of one overlay as containers, in a network of their own."""

    documents: Sequence[dict[str, Any]]
    secrets: Path
    network: str
    model: Path
    """Folder that stands for the claim of the model"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of each container that override those of the manifests"""
    started: dict[str, str] = field(default_factory=dict)
    """Containers by the names that they have in the manifests"""

    def start(self, pod: dict[str, Any]) -> None:
        """Run the init containers of a pod to their ends, and start the others."""
        first: str | None = None
        specification = pod["spec"]
        for container in specification.get("initContainers", ()):
            if container.get("restartPolicy") == "Always":
                first = self._run(pod, container, first)
            else:
                self._run(pod, container, None, "--rm", detached=False)
        for container in specification["containers"]:
            if container["image"].startswith("tokenwire"):
                first = self._run(pod, container, first)

    def finish(self, pod: dict[str, Any]) -> None:
        """Run the pod of a Job to its end, in the network of this machine."""
        [container] = pod["spec"]["containers"]
        self._run(pod, container, None, "--rm", "--network=host", detached=False)

    def _run(
        self,
        pod: dict[str, Any],
        container: dict[str, Any],
        first: str | None,
        *options: str,
        detached: bool = True,
    ) -> str:
        """Start a container, in the network of the pod's first one if there is one."""
        name = container["name"]
        network: list[str] = []
        if first is not None:
            network = [f"--network=container:{first}"]
        elif not any(option.startswith("--network") for option in options):
            labels = pod["metadata"]["labels"].items()
            network = [f"--network={self.network}"]
            network += [
                f"--network-alias={each['metadata']['name']}"
                for each in self.documents
                if each["kind"] == "Service" and each["spec"]["selector"].items() <= labels
            ]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        user = pod["spec"]["securityContext"]["runAsUser"]
        variables = self._variables(container)
        command = [*container.get("command", ()), *container.get("args", ())]
        command = [
            re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], part) for part in command
        ]
        if name == "engine":
            command = small(command)
        entry = ["--entrypoint", command.pop(0)] if "command" in container else []
        identity = docker(
            "run",
            *(["-d"] if detached else []),
            *options,
            "--read-only",
            f"--user={user}:{user}",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            *network,
            *(part for key, value in variables.items() for part in ("-e", f"{key}={value}")),
            *self.mounts(pod["spec"], container),
            *entry,
            container["image"],
            *command,
        )
        if detached:
            self.started[name] = identity
        return identity

    def _variables(self, container: dict[str, Any]) -> dict[str, str]:
        """Return the environment of a container; optional Secrets do not exist."""
        maps = [each for each in self.documents if each["kind"] == "ConfigMap"]
        data = {each["metadata"]["name"]: each["data"] for each in maps}
        values = {**LEADER}
        for source in container.get("envFrom", ()):
            values |= data[source["configMapRef"]["name"]]
        for variable in container.get("env", ()):
            if "value" in variable:
                values[variable["name"]] = variable["value"]
            else:
                assert variable["valueFrom"]["secretKeyRef"]["optional"]
        return {**values, **self.variables}

    def mounts(self, pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
        """Yield the options that mount the volumes of a container."""
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container.get("volumeMounts", ()):
            volume, path = volumes.get(mount["name"], {}), mount["mountPath"]
            if "persistentVolumeClaim" in volume:
                access = ",readonly" if mount.get("readOnly") else ""
                yield f"--mount=type=bind,source={self.model},destination={path}{access}"
            elif "secret" in volume:
                source = self.secrets / volume["secret"]["secretName"]
                yield f"--mount=type=bind,source={source},destination={path},readonly"
            else:
                owner = pod["securityContext"]["fsGroup"]
                yield f"--tmpfs={path}:exec,uid={owner},gid={owner}"

    def passes(self, container: dict[str, Any], probe: Mapping[str, Any]) -> bool:
        """Return whether a probe of a container succeeds."""
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if "grpc" in probe:
            grpc = probe["grpc"]
            arguments = ("grpc", str(grpc["port"]), grpc.get("service", ""))
        else:
            get = probe["httpGet"]
            arguments = ("httpGet", str(ports.get(get["port"], get["port"])), get["path"])
        check = ("docker", "exec", self.started[container["name"]], "python", "-c", PROBE)
        return (
            subprocess.run([*check, *arguments], check=False, capture_output=True).returncode == 0
        )

    def await_probes(self, pod: dict[str, Any]) -> None:
        """Return when the pod has started, is ready and lives, by its own probes."""
        deadline = time.monotonic() + START_SECONDS
        for container in pod["spec"]["containers"]:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                while not self.passes(container, container[kind]):
                    identity = self.started[container["name"]]
                    log = logs(identity)
                    state = docker("inspect", "-f", "{{.State.Status}}", identity)
                    assert state == "running", f"{container['name']}: {log}"
                    assert time.monotonic() < deadline, f"{kind} of {container['name']}: {log}"
                    time.sleep(0.5)

    def address(self, container: str) -> str:
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return docker("inspect", "-f", form, self.started[container])

    def close(self) -> None:
        if self.started:
            docker("rm", "-f", "-v", *self.started.values())
        docker("network", "rm", self.network)


def small(command: Sequence[str]) -> list[str]:
    """Return the command of an engine with flags for this machine."""
    if not any(part.startswith("exec torchrun ") for part in command):
        return [*command, *SMALL]
    script = command[-1].replace("--nproc-per-node 8", "--nproc-per-node 1")
    return [*command[:-1], f"{script} {' '.join(SMALL)}"]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a folder of a folder for each Secret, and an API key."""
    folder = tmp_path_factory.mktemp("secrets")
    for name in ("api-keys", "peer-token"):
        (folder / name).mkdir()
    key = add_key(folder / "api-keys" / "keys.json", name="alice")
    (folder / "peer-token" / "token").write_text(os.urandom(32).hex())
    for path in [folder.parent, folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder, key


@pytest.fixture
def clusters(secrets: tuple[Path, str]) -> Iterator[list[Cluster]]:
    opened: list[Cluster] = []
    yield opened
    for each in opened:
        each.close()


def cluster(
    clusters: list[Cluster],
    documents: Sequence[dict[str, Any]],
    secrets: Path,
    model: Path = MODEL,
) -> Cluster:
    network = f"tokenwire-test-{os.getpid()}"
    docker("network", "create", network)
    clusters.append(Cluster(documents, secrets, network, model))
    return clusters[-1]


def test_demo_serves_without_a_volume_or_a_secret(
    clusters: list[Cluster], secrets: tuple[Path, str]
) -> None:
    documents = rendered("demo")
    demo = cluster(clusters, documents, secrets[0])
    for _, pod in pods(documents):
        demo.start(pod)
    for _, pod in pods(documents):
        demo.await_probes(pod)
    assert completion(f"http://{demo.address('http-shim')}:8000") == 8


def test_services_with_keys_and_token_serve_a_model_that_a_job_downloads(
    clusters: list[Cluster], secrets: tuple[Path, str], tmp_path: Path
) -> None:
    documents = with_components(tmp_path, "cpu", "model-download")
    folder, key = secrets
    claim = tmp_path / "claim"
    claim.mkdir()
    for path in (tmp_path.parent, tmp_path):
        path.chmod(0o755)
    claim.chmod(0o777)
    started = cluster(clusters, documents, folder, claim)
    with running_hub(Hub({"a/model": MODEL})) as hub:
        started.variables = {"HF_ENDPOINT": hub.url, "MODEL_SOURCE": "hf:a/model"}
        [job] = [each["spec"]["template"] for each in documents if each["kind"] == "Job"]
        started.finish(job)
    started.variables = {}
    assert (claim / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    for _, pod in pods(documents):
        started.start(pod)
    for _, pod in pods(documents):
        started.await_probes(pod)
    url = f"http://{started.address('http-shim')}:8000"
    with pytest.raises(urllib.error.HTTPError) as refused:
        completion(url)
    assert refused.value.code == 401
    assert completion(url, key) == 8


def test_pod_of_llm_d_serves_by_itself(clusters: list[Cluster], secrets: tuple[Path, str]) -> None:
    documents = rendered("llm-d")
    [pod] = [pod for name, pod in pods(documents) if name == "model-server"]
    folder, key = secrets
    started = cluster(clusters, documents, folder)
    started.start(pod)
    started.await_probes(pod)
    assert completion(f"http://{started.address('grammar')}:8000", key) == 8


@pytest.mark.parametrize("overlay", ["gpu", "tensor-parallel"])
def test_engine_of_an_overlay_starts(
    clusters: list[Cluster], secrets: tuple[Path, str], overlay: str
) -> None:
    documents = rendered(overlay)
    found = [pod for name, pod in pods(documents) if name == "engine"]
    found += [
        each["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        for each in documents
        if each["kind"] == "LeaderWorkerSet"
    ]
    [pod] = found
    started = cluster(clusters, documents, secrets[0])
    started.start(pod)
    started.await_probes(pod)


def test_each_overlay_is_started_or_has_the_commands_of_others() -> None:
    """An overlay that is added needs a test above."""
    started = {"demo", "cpu", "llm-d", "gpu", "tensor-parallel"}
    others = {"envoy": "cpu"}
    assert started | others.keys() == set(OVERLAYS)
    for overlay, same in others.items():
        commands = {
            name: pod["spec"]["containers"][0]["args"]
            for name, pod in pods(rendered(overlay))
            if name not in ("engine", "envoy")
        }
        known = {name: pod["spec"]["containers"][0]["args"] for name, pod in pods(rendered(same))}
        assert commands.items() <= known.items()
