"""The Helm chart in this folder, made of the manifests in ../kubernetes. Needs kubectl.

Usage: python deploy/helm/generate.py [FOLDER]

Each manifest of the base, as Kustomize renders it, becomes a template: what the chart's values
choose is replaced by an expression, and the rest stays as it is. Overlays become files of values.
"""

import itertools
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Manifest: TypeAlias = dict[str, Any]

WORKLOADS = ("Deployment", "StatefulSet")
KEYS = {"http-shim": "httpShim"}
"""Keys of the values whose services have names that a template can't write"""
SECRETS = {"keys": "keys", "peer-token": "peerToken"}
"""Keys of the values by the volumes that a Secret fills"""
DOWNLOAD = ".Values.modelDownload.enabled"
COMPONENTS = MANIFESTS / "components"
[_WAITING] = yaml.safe_load((COMPONENTS / "model-download" / "wait-for-model.yaml").read_text())
INIT_CONTAINERS: Sequence[Manifest] = _WAITING["value"]
"""Containers that wait for the download of the model"""
PRESETS: Mapping[str, Manifest] = {
    "cpu": {},
    "gpu": {},
    "demo": {
        "autoscaling": {"enabled": False},
        "keys": {"secret": ""},
        "peerToken": {"secret": ""},
        "model": {"claim": ""},
        "jobs": {"storage": ""},
    },
}
"""Overlays, and what their files of values say besides arguments, resources and replicas"""
HELPERS = """\
{{- /* Made by deploy/helm/generate.py */}}
{{- define "tokenwire.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- define "tokenwire.configuration" -}}
model-{{ toYaml (list .Values.model .Values.modelDownload.source) | sha256sum | trunc 10 }}
{{- end }}
"""
COMMENTS = {
    "namespace": "Create the release's namespace, with the label of restricted pods",
    "image": "Registry and folder, as in registry.example/folder, and tag, by default the version",
    "model": "Checkpoint's folder, name, and claim of its volume; '': the folder is in the images",
    "keys": "Secret with keys.json; empty: anyone who reaches the shim is served",
    "peerToken": "Secret with the token of the services; empty: they show each other none",
    "limits": "Secret with the url of a Redis that counts the limits of keys, if it exists",
    "autoscaling": "Without it there is one pod of engine, tokenizer and shim each",
    "serviceMonitor": "For Prometheus Operator",
    "modelDownload": "A claim, and a Job that fills it from the hub: hf:owner/name",
}


class Templates:
    """Expressions of templates, and the words that stand for them until YAML is written."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._inline: dict[str, str] = {}
        self._lines: dict[str, str] = {}

    def inline(self, expression: str) -> str:
        """Return a word that becomes the expression, within a scalar."""
        return self._word(self._inline, f"{{{{ {expression} }}}}")

    def line(self, action: str) -> str:
        """Return a word that becomes an action in place of its line: an item, or a value."""
        return self._word(self._lines, action)

    def when(self, condition: str, items: Sequence[Any]) -> list[Any]:
        """Return items of a list that are there on a condition."""
        return [self.line(f"{{{{- if {condition} }}}}"), *items, self.line("{{- end }}")]

    def items(self, path: str, indent: int) -> str:
        """Return a word that becomes the items of a list of the values, which may be empty."""
        items = f"{{{{- toYaml . | nindent {indent} }}}}"
        return self.line(f"{{{{- with {path} }}}}\n{' ' * indent}{items}\n{{{{- end }}}}")

    def value(self, key: str, path: str) -> str:
        """Return a word that becomes a key with a structure of the values."""
        return self.line(f"{key}: {{{{- toYaml {path} | nindent INDENT }}}}")

    def optional(self, key: str, condition: str, text: str) -> str:
        """Return a word that becomes a key with a structure, which is there on a condition."""
        return self.line(f"{{{{- if {condition} }}}}\n{key}:{text}\n{{{{- end }}}}")

    def _word(self, words: dict[str, str], text: str) -> str:
        word = f"TEMPLATE{next(self._numbers)}X"
        words[word] = text
        return word

    def write(self, manifest: Manifest | list[Manifest]) -> str:
        """Return a structure as a template."""
        lines = yaml.safe_dump(manifest, sort_keys=False, width=1_000).splitlines()
        return "".join(self._write_line(line) + "\n" for line in lines)

    def _write_line(self, line: str) -> str:
        for word, text in self._inline.items():
            line = re.sub(rf"{word}\b", lambda _, text=text: text, line)
        whole = re.fullmatch(r"(\s*)(?:- |([\w.]+): )(TEMPLATE\d+X)", line)
        if whole is None:
            return line
        space, key, word = whole.groups()
        text = self._lines[word]
        if key is None:
            return text
        return textwrap.indent(text.replace("INDENT", str(len(space) + 2)), space)


def rendered(folder: Path) -> list[Manifest]:
    command = ["kubectl", "kustomize", str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(output))


def key_of(name: str) -> str:
    return KEYS.get(name, name)


def container_of(manifest: Manifest) -> Manifest:
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    return dict(container)


def workloads(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] in WORKLOADS}


def default_values(manifests: Sequence[Manifest]) -> Manifest:
    """Return the chart's values, which render the base."""
    values: Manifest = {
        "namespace": {"create": False},
        "image": {"registry": "", "tag": ""},
        "model": {"path": "/model", "id": "model", "claim": "model"},
        "keys": {"secret": "api-keys"},
        "peerToken": {"secret": "peer-token"},
        "limits": {"secret": "limits"},
        "autoscaling": {"enabled": True},
        "serviceMonitor": {"enabled": False},
        "modelDownload": {"enabled": False, "source": "", "storage": "20Gi"},
    }
    scalers = {
        each["metadata"]["name"]: each["spec"]
        for each in manifests
        if each["kind"] == "HorizontalPodAutoscaler"
    }
    for name, manifest in workloads(manifests).items():
        own: Manifest = {"extraArgs": [], "resources": container_of(manifest)["resources"]}
        if name in scalers:
            own["minReplicas"] = scalers[name]["minReplicas"]
            own["maxReplicas"] = scalers[name]["maxReplicas"]
        elif name != "jobs":  # it owns its volume alone
            own["replicas"] = manifest["spec"]["replicas"]
        if claims := manifest["spec"].get("volumeClaimTemplates"):
            own["storage"] = claims[0]["spec"]["resources"]["requests"]["storage"]
        if name == "engine":
            own["image"] = _name_of(container_of(manifest)["image"])
            own |= {"tolerations": [], "extraVolumes": [], "extraVolumeMounts": []}
        values[key_of(name)] = own
    return values


def preset(overlay: Sequence[Manifest], base: Sequence[Manifest], fixed: Manifest) -> Manifest:
    """Return the values by which an overlay differs from the base."""
    values = {key: dict(value) for key, value in fixed.items()}
    before = workloads(base)
    for name, manifest in workloads(overlay).items():
        own: Manifest = {}
        container, plain = container_of(manifest), container_of(before[name])
        if container["resources"] != plain["resources"]:
            own["resources"] = container["resources"]
        known = {*plain["args"], "--open"}  # which follows from the absence of keys
        if more := [each for each in container["args"] if each not in known]:
            own["extraArgs"] = more
        if manifest["spec"].get("replicas") != before[name]["spec"].get("replicas"):
            own["replicas"] = manifest["spec"]["replicas"]
        pod, plain_pod = (each["spec"]["template"]["spec"] for each in (manifest, before[name]))
        if tolerations := pod.get("tolerations"):
            own["tolerations"] = tolerations
        if container["image"] != plain["image"]:
            own["image"] = _name_of(container["image"])
        if name == "engine" and (volumes := _added(pod["volumes"], plain_pod["volumes"])):
            own["extraVolumes"] = volumes
            own["extraVolumeMounts"] = _added(container["volumeMounts"], plain["volumeMounts"])
        if own:
            values[key_of(name)] = values.get(key_of(name), {}) | own
    [model] = [each["data"] for each in overlay if each["kind"] == "ConfigMap"]
    if model != {"MODEL": "/model", "MODEL_ID": "model"}:
        path = {"path": model["MODEL"], "id": model["MODEL_ID"]}
        values["model"] = values.get("model", {}) | path
    return values


def _added(items: Sequence[Manifest], before: Sequence[Manifest]) -> list[Manifest]:
    """Return the items whose names are not among those before."""
    known = {each["name"] for each in before}
    return [each for each in items if each["name"] not in known]


def template(manifest: Manifest) -> str:
    """Return the template of a manifest of the base."""
    templates = Templates()
    name, kind = manifest["metadata"]["name"], manifest["kind"]
    manifest["metadata"].pop("namespace", None)
    if kind != "Namespace":
        manifest["metadata"]["namespace"] = templates.inline(".Release.Namespace")
    if kind in WORKLOADS:
        _open_workload(templates, manifest)
        return templates.write(manifest)
    if kind == "HorizontalPodAutoscaler":
        for bound in ("minReplicas", "maxReplicas"):
            manifest["spec"][bound] = templates.inline(f".Values.{key_of(name)}.{bound}")
        return _on(".Values.autoscaling.enabled", templates.write(manifest))
    if kind == "ConfigMap":
        manifest["metadata"]["name"] = templates.inline('include "tokenwire.configuration" .')
        manifest["data"]["MODEL"] = templates.inline(".Values.model.path | quote")
        manifest["data"]["MODEL_ID"] = templates.inline(".Values.model.id | quote")
        why = "modelDownload.source names the model to download, such as hf:owner/name"
        source = f' {{{{ required "{why}" .Values.modelDownload.source | quote }}}}'
        manifest["data"]["MODEL_SOURCE"] = templates.optional("MODEL_SOURCE", DOWNLOAD, source)
    if kind == "Namespace":
        manifest["metadata"]["name"] = templates.inline(".Release.Namespace")
        return _on(".Values.namespace.create", templates.write(manifest))
    if kind == "PersistentVolumeClaim":
        manifest["metadata"]["name"] = templates.inline(".Values.model.claim")
        requests = manifest["spec"]["resources"]["requests"]
        requests["storage"] = templates.inline(".Values.modelDownload.storage")
        return _on(DOWNLOAD, templates.write(manifest))
    if kind == "Job":
        _open_download(templates, manifest)
        return _on(DOWNLOAD, templates.write(manifest))
    if kind == "ServiceMonitor":
        return _on(".Values.serviceMonitor.enabled", templates.write(manifest))
    return templates.write(manifest)


def _on(condition: str, text: str) -> str:
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


def _open_workload(templates: Templates, manifest: Manifest) -> None:
    """Replace by expressions what the values say of a Deployment or StatefulSet."""
    name = manifest["metadata"]["name"]
    values = f".Values.{key_of(name)}"
    spec = manifest["spec"]
    if name != "jobs" and "replicas" in spec:
        spec["replicas"] = templates.inline(f"{values}.replicas")
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    if name == "engine":
        container["image"] = _named_image(templates, f"{values}.image")
    else:
        container["image"] = _image(templates, container["image"])
    container["args"] = [*_arguments(templates, container["args"], name)]
    more = f"{{{{- range {values}.extraArgs }}}}\n        - {{{{ . | quote }}}}\n{{{{- end }}}}"
    container["args"].append(templates.line(more))
    container["resources"] = templates.value("resources", f"{values}.resources")
    for source in container.get("envFrom", ()):
        source["configMapRef"]["name"] = templates.inline('include "tokenwire.configuration" .')
    for variable in container.get("env", ()):
        variable["valueFrom"]["secretKeyRef"]["name"] = templates.inline(".Values.limits.secret")
    container["volumeMounts"] = [*_volumes(templates, container["volumeMounts"])]
    for volume in pod["volumes"]:
        if volume["name"] == "model":
            claim = templates.inline(".Values.model.claim")
            volume["persistentVolumeClaim"]["claimName"] = claim
        elif volume["name"] in SECRETS:
            secret = f".Values.{SECRETS[volume['name']]}.secret"
            volume["secret"]["secretName"] = templates.inline(secret)
    if any(volume["name"] == "model" for volume in pod["volumes"]):
        waiting = [{**each, "image": _image(templates, each["image"])} for each in INIT_CONTAINERS]
        structure = "\n" + templates.write(waiting).rstrip()
        pod["initContainers"] = templates.optional("initContainers", DOWNLOAD, structure)
    pod["volumes"] = [*_volumes(templates, pod["volumes"])]
    if name == "engine":
        tolerations = f"{values}.tolerations"
        structure = f" {{{{- toYaml {tolerations} | nindent INDENT }}}}"
        pod["tolerations"] = templates.optional("tolerations", tolerations, structure)
        mounts = templates.items(f"{values}.extraVolumeMounts", indent=8)
        container["volumeMounts"].append(mounts)
        pod["volumes"].append(templates.items(f"{values}.extraVolumes", indent=6))
    if claims := spec.get("volumeClaimTemplates"):
        condition = f"{values}.storage"
        claims[0]["spec"]["resources"]["requests"]["storage"] = templates.inline(condition)
        structure = "\n" + templates.write(claims).rstrip()
        spec["volumeClaimTemplates"] = templates.optional(
            "volumeClaimTemplates", condition, structure
        )
        empty = {"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}
        pod["volumes"] += templates.when(f"not {condition}", [empty])


def _open_download(templates: Templates, manifest: Manifest) -> None:
    pod = manifest["spec"]["template"]["spec"]
    [container] = pod["containers"]
    container["image"] = _image(templates, container["image"])
    [source] = container["envFrom"]
    source["configMapRef"]["name"] = templates.inline('include "tokenwire.configuration" .')
    [claim] = [each for each in pod["volumes"] if each["name"] == "model"]
    claim["persistentVolumeClaim"]["claimName"] = templates.inline(".Values.model.claim")


def _name_of(image: str) -> str:
    return image.partition(":")[0]


def _image(templates: Templates, image: str) -> str:
    return _named_image(templates, f'"{_name_of(image)}"')


def _named_image(templates: Templates, name: str) -> str:
    """Return a word for the image with a name, which is an expression."""
    return templates.inline(f'include "tokenwire.image" (dict "root" . "name" {name})')


def _arguments(templates: Templates, arguments: Sequence[str], name: str) -> Iterator[str]:
    for argument in arguments:
        if argument.startswith("--keys="):
            yield from templates.when(".Values.keys.secret", [argument])
            if name == "http-shim":
                yield from templates.when("not .Values.keys.secret", ["--open"])
        elif argument.startswith("--peer-token-file="):
            yield from templates.when(".Values.peerToken.secret", [argument])
        else:
            yield argument


def _volumes(templates: Templates, volumes: Sequence[Manifest]) -> Iterator[Any]:
    for volume in volumes:
        if volume["name"] == "model":
            yield from templates.when(".Values.model.claim", [volume])
        elif volume["name"] in SECRETS:
            secret = f".Values.{SECRETS[volume['name']]}.secret"
            yield from templates.when(secret, [volume])
        else:
            yield volume


def write_values(path: Path, values: Manifest, heading: str) -> None:
    text = yaml.safe_dump(values, sort_keys=False)
    if path.name == "values.yaml":
        for key, comment in COMMENTS.items():
            text = re.sub(rf"^{key}:", f"# {comment}.\n{key}:", text, flags=re.MULTILINE)
    path.write_text(f"# {heading}\n{text}")


def write_chart(folder: Path) -> None:
    base = rendered(MANIFESTS / "base")
    monitor = (COMPONENTS / "service-monitor" / "service-monitor.yaml").read_text()
    download = (COMPONENTS / "model-download" / "model-download.yaml").read_text()
    optional = [*yaml.safe_load_all(monitor), *yaml.safe_load_all(download)]
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    for old in folder.glob("**/*.yaml"):
        old.unlink()
    write_values(folder / "values.yaml", default_values(base), "Made by deploy/helm/generate.py")
    for name, fixed in PRESETS.items():
        overlay = rendered(MANIFESTS / "overlays" / name)
        heading = f"The overlay `{name}`: helm install -f values-{name}.yaml …"
        write_values(folder / f"values-{name}.yaml", preset(overlay, base, dict(fixed)), heading)
    chart = {
        "apiVersion": "v2",
        "name": PROJECT["name"],
        "description": PROJECT["description"],
        "type": "application",
        "version": PROJECT["version"],
        "appVersion": PROJECT["version"],
    }
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart, sort_keys=False))
    (folder / "templates" / "_helpers.tpl").write_text(HELPERS)
    files: dict[str, list[str]] = {}
    for manifest in [*base, *optional]:
        name = manifest["metadata"]["name"]
        if manifest["kind"] in ("PersistentVolumeClaim", "Job"):
            name = "model-download"
        elif manifest["kind"] in ("ConfigMap", "Namespace", "ServiceMonitor", "NetworkPolicy"):
            name = manifest["kind"].lower()
        files.setdefault(name, []).append(template(manifest))
    for name, texts in files.items():
        (folder / "templates" / f"{name}.yaml").write_text("---\n".join(texts))


if __name__ == "__main__":
    write_chart(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "tokenwire")
