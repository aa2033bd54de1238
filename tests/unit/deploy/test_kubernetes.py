"""The Kubernetes manifests: a cluster accepts them, and their parts fit together."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.common.network.health import LIVENESS
from services.common.vllm_metrics import ModelLoad, VllmLoadMetrics
from services.engine.settings import EngineSettings
from services.grammar.settings import GrammarSettings
from services.http_shim.settings import HttpShimSettings
from services.jobs.settings import JobsSettings
from services.tokenizer.metrics import RUNNING
from services.tokenizer.settings import TokenizerSettings
from tests.manifests import (
    KUBERNETES,
    OVERLAYS,
    containers,
    needs_kubectl,
    pods,
    rendered,
    with_components,
)

CUSTOM_KINDS = {"LeaderWorkerSet", "InferencePool", "HTTPRoute", "ServiceMonitor", "ScaledObject"}
"""Kinds that Kubernetes itself does not have"""
SETTINGS = {
    "engine": EngineSettings,
    "grammar": GrammarSettings,
    "tokenizer": TokenizerSettings,
    "http-shim": HttpShimSettings,
    "jobs": JobsSettings,
}

LOAD = ModelLoad("m", *range(8))

BASE = sorted((KUBERNETES / "base").glob("[!k]*.yaml"))


@pytest.mark.parametrize("file", BASE, ids=lambda file: file.stem)
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
    plugins = yaml.safe_load((KUBERNETES / "overlays" / "llm-d" / "plugins.yaml").read_text())
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
    settings = yaml.safe_load((KUBERNETES.parent / "envoy" / "envoy.yaml").read_text())
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
    files = {f"/etc/envoy/{path.name}" for path in (KUBERNETES.parent / "envoy").glob("[!k]*.yaml")}
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
@pytest.mark.parametrize("overlay", sorted({*OVERLAYS} - {"demo", "llm-d"}))
def test_services_that_take_keys_report_their_usage_to_the_jobs(overlay: str) -> None:
    """Else budgets and `tokenwire usage` would count HTTP alone, and not what gRPC clients use."""
    documents = rendered(overlay)
    [policy] = [
        each["spec"]
        for each in documents
        if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", "jobs")
    ]
    admitted = [
        peer["podSelector"]["matchLabels"].items()
        for rule in policy["ingress"]
        for peer in rule["from"]
        if {"port": 50054} in rule["ports"]
    ]
    reporting = set()
    for name, pod in pods(documents):
        for container in containers(pod):
            flags = dict(arg.partition("=")[::2] for arg in container.get("args", ()))
            if "--keys" in flags and name != "jobs":
                reporting.add(name)
                assert flags["--jobs"] == "jobs:50054"
                labels = pod["metadata"]["labels"].items()
                assert any(selected <= labels for selected in admitted), name
    assert reporting == {"http-shim", "tokenizer"}


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


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_undoes_the_number_of_pods_that_an_autoscaler_chose(overlay: str) -> None:
    documents = rendered(overlay)
    scaled = {
        (each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"])
        for each in documents
        if each["kind"] == "HorizontalPodAutoscaler"
    }
    assert bool(scaled) == (overlay not in ("demo", "llm-d"))
    for document in documents:
        if (document["kind"], document["metadata"]["name"]) in scaled:
            assert "replicas" not in document["spec"]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_volumes_of_temporary_files_are_bounded(overlay: str) -> None:
    """A pod that fills one is evicted, before it fills the disk of its node."""
    for _, pod in pods(rendered(overlay)):
        for volume in pod["spec"]["volumes"]:
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]


@needs_kubectl
def test_demo_fits_a_machine_of_two_cores_and_needs_nothing_else() -> None:
    documents = rendered("demo")
    requested = [
        container["resources"]["requests"]["cpu"]
        for _, pod in pods(documents)
        for container in containers(pod)
    ]
    assert sum(int(cpu.removesuffix("m")) for cpu in requested) <= 1000  # Kubernetes has the rest
    for _, pod in pods(documents):
        assert all("emptyDir" in volume for volume in pod["spec"]["volumes"])


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_lost_service_restarts_none_of_those_before_it(overlay: str) -> None:
    """Their health says NOT_SERVING, which is not the liveness of their process."""
    for name, container, _ in services_of(overlay):
        if "livenessProbe" not in container:  # a sidecar
            continue
        probe = container["livenessProbe"]
        if name == "http-shim":
            assert probe["httpGet"]["path"] == "/health"
        else:
            assert probe["grpc"]["service"] == LIVENESS


@needs_kubectl
def test_prometheus_operator_finds_the_metrics_of_all_services(tmp_path: Path) -> None:
    documents = with_components(tmp_path, "cpu", "service-monitor")
    [monitor] = [each["spec"] for each in documents if each["kind"] == "ServiceMonitor"]
    [endpoint] = monitor["endpoints"]
    services = [each for each in documents if each["kind"] == "Service"]
    labels = monitor["selector"]["matchLabels"].items()
    offering = {
        each["metadata"]["name"]
        for each in services
        if labels <= each["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}
    }
    assert offering == set(SETTINGS)
    alerts = (KUBERNETES.parent / "observability" / "alerts.yml").read_text()
    [relabeling] = endpoint["relabelings"]
    jobs = {re.sub(relabeling["regex"], relabeling["replacement"], each) for each in offering}
    assert all(re.search(rf'job=~"[^"]*\b{job}\b', alerts) for job in jobs)


@needs_kubectl
def test_services_wait_for_the_download_of_their_model(tmp_path: Path) -> None:
    documents = with_components(tmp_path, "cpu", "model-download")
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    [job] = [each["spec"]["template"] for each in documents if each["kind"] == "Job"]
    [download] = job["spec"]["containers"]
    assert "/model/.downloaded" in download["args"][0]
    for name, pod in pods(documents):
        waits = pod["spec"].get("initContainers", ())
        assert bool(waits) == (name in ("engine", "grammar", "tokenizer"))
        for each in waits:
            assert "/model/.downloaded" in each["command"][-1]
            assert each["securityContext"]["readOnlyRootFilesystem"] is True


@needs_kubectl
def test_requests_reach_the_tokenizer_services_while_there_is_no_engine(tmp_path: Path) -> None:
    documents = with_components(tmp_path, "gpu", "scale-to-zero")
    [scaler] = [each["spec"] for each in documents if each["kind"] == "ScaledObject"]
    assert scaler["minReplicaCount"] == 0
    [trigger] = scaler["triggers"]
    assert f"{RUNNING._name}{{" in trigger["metadata"]["query"]
    scaled = [e["metadata"]["name"] for e in documents if e["kind"] == "HorizontalPodAutoscaler"]
    assert sorted(scaled) == ["http-shim", "tokenizer"]
    found = {name: pod["spec"]["containers"][0] for name, pod in pods(documents)}
    assert found["tokenizer"]["readinessProbe"]["grpc"]["service"] == LIVENESS
    assert found["http-shim"]["readinessProbe"]["httpGet"]["path"] == "/health"
