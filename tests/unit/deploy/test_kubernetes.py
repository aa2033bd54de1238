"""The Kubernetes manifests: a cluster accepts them, and their parts fit together."""

import dataclasses
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.common.vllm_metrics import ModelLoad, VllmLoadMetrics
from services.engine.settings import EngineSettings
from services.grammar.settings import GrammarSettings
from services.http_shim.settings import HttpShimSettings
from services.jobs.settings import JobsSettings
from services.tokenizer.settings import TokenizerSettings

ROOT = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
CUSTOM_KINDS = {"LeaderWorkerSet", "InferencePool", "HTTPRoute"}
"""Kinds that Kubernetes itself does not have"""
SETTINGS = {
    "engine": EngineSettings,
    "grammar": GrammarSettings,
    "tokenizer": TokenizerSettings,
    "http-shim": HttpShimSettings,
    "jobs": JobsSettings,
}

LOAD = ModelLoad("m", *range(8))

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


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all containers of a pod, also those that run before and beside the others."""
    return [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]


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
    pools = {d["metadata"]["name"] for d in documents if d["kind"] == "InferencePool"}
    for name, pod in pods(documents):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
        if name in pools:
            continue
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
    for _, pod in pods(rendered(overlay)):
        for container in containers(pod):
            if container["name"] not in SETTINGS:
                continue
            flags = dict(arg.lstrip("-").partition("=")[::2] for arg in container["args"])
            known = {field.name for field in dataclasses.fields(SETTINGS[container["name"]])}
            assert {flag.replace("-", "_") for flag in flags} <= known
            if container.get("restartPolicy") == "Always":  # it stops after the others
                continue
            before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert int(flags["grace"]) + before < pod["spec"]["terminationGracePeriodSeconds"]


@needs_kubectl
def test_endpoint_picker_finds_the_shims_and_reads_metrics_that_they_serve() -> None:
    documents = rendered("llm-d")
    [pool] = [each["spec"] for each in documents if each["kind"] == "InferencePool"]
    [model_server] = [pod for name, pod in pods(documents) if name == "model-server"]
    labels = model_server["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    [shim] = model_server["spec"]["containers"]
    [target] = pool["targetPorts"]
    assert target["number"] in {port["containerPort"] for port in shim["ports"]}
    assert "--vllm-metrics" in shim["args"]
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    picker = pool["endpointPickerRef"]
    assert picker["port"]["number"] in {p["port"] for p in services[picker["name"]]["ports"]}
    plugins = yaml.safe_load((ROOT / "overlays" / "llm-d" / "plugins.yaml").read_text())
    [extractor] = [p for p in plugins["plugins"] if p["type"] == "core-metrics-extractor"]
    [mapping] = extractor["parameters"]["engineConfigs"]
    assert labels["inference.networking.k8s.io/engine-type"] == mapping["name"]
    served = {metric.name for metric in VllmLoadMetrics(lambda: [LOAD]).collect()}
    assert {spec for key, spec in mapping.items() if key.endswith("Spec") and spec} <= served
    names = {plugin["type"] for plugin in plugins["plugins"]}
    for profile in plugins["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= names


@needs_kubectl
def test_envoy_finds_the_services_by_the_names_of_its_configuration() -> None:
    documents = rendered("envoy")
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    settings = yaml.safe_load((ROOT.parent / "envoy" / "envoy.yaml").read_text())
    for cluster in settings["static_resources"]["clusters"]:
        [endpoints] = cluster["load_assignment"]["endpoints"]
        [endpoint] = endpoints["lb_endpoints"]
        place = endpoint["endpoint"]["address"]["socket_address"]
        service = services[place["address"]]
        assert service["clusterIP"] == "None"  # otherwise all addresses hide behind one
        assert place["port_value"] in {port["port"] for port in service["ports"]}
    [envoy] = [pod for name, pod in pods(documents) if name == "envoy"]
    [container] = envoy["spec"]["containers"]
    offered = {port["containerPort"] for port in container["ports"]}
    listeners = settings["static_resources"]["listeners"]
    assert offered == {each["address"]["socket_address"]["port_value"] for each in listeners}
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    files = {f"/etc/envoy/{path.name}" for path in (ROOT.parent / "envoy").glob("[!k]*.yaml")}
    assert mounted == files | {"/etc/envoy/tls"}


def services_of(overlay: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name of each service of ours, its container and its pod's specification."""
    for _, pod in pods(rendered(overlay)):
        for container in containers(pod):
            if container["name"] in SETTINGS:
                yield container["name"], container, pod["spec"]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_show_each_other_one_mounted_token(overlay: str) -> None:
    """Whoever else reaches a port needs a key, in all overlays but the demo.

    The services of a pod of llm-d reach each other over loopback, and nobody else reaches them.
    """
    for name, container, pod in services_of(overlay):
        flags = dict(arg.lstrip("-").partition("=")[::2] for arg in container["args"])
        token, keys = flags.get("peer-token-file"), flags.get("keys")
        keyed = {"http-shim"} if overlay == "llm-d" else {"http-shim", "jobs", "tokenizer"}
        assert (token is None) == (overlay in ("demo", "llm-d"))
        assert (keys is None) == (overlay == "demo" or name not in keyed)
        secrets = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in pod["volumes"]
            if "secret" in volume
        }
        mounted = {
            mount["mountPath"]: secrets.get(mount["name"]) for mount in container["volumeMounts"]
        }
        for file, secret in ((token, "peer-token"), (keys, "api-keys")):
            if file is not None:
                assert mounted[file.rpartition("/")[0]] == secret


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_redis_of_the_limits_is_optional(overlay: str) -> None:
    named = {}
    for name, container, _ in services_of(overlay):
        for variable in container.get("env", ()):
            source = variable["valueFrom"]["secretKeyRef"]
            assert source == {"name": "limits", "key": "url", "optional": True}
            named[name] = variable["name"]
    expected = {
        "http-shim": "TOKENWIRE_HTTP_SHIM_LIMITS_URL",
        "jobs": "TOKENWIRE_JOBS_LIMITS_URL",
        "tokenizer": "TOKENWIRE_TOKENIZER_LIMITS_URL",
    }
    if overlay == "llm-d":
        del expected["tokenizer"], expected["jobs"]
    assert named == expected
