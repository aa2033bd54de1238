"""List of the packages in a folder of site-packages: a CycloneDX document, by pip's metadata.

Usage: python sbom.py PYPROJECT SITE-PACKAGES >sbom.json
"""

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TypeAlias

from pip._vendor.packaging.requirements import Requirement

Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | int"


def purl(name: str, version: str) -> str:
    """Return the package URL, which is also the reference within the document."""
    return f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{version}"


def license_of(package: Distribution) -> Json:
    """Return the `licenses` of a component, by the core metadata's fields in order of precision."""
    if expression := package.metadata.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = package.metadata.get_all("Classifier") or []
    names = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License")]
    if not names and (text := package.metadata.get("License")):
        names = [text.partition("\n")[0]]
    return [{"license": {"name": name}} for name in names]


def requirements(package: Distribution, references: Mapping[str, str]) -> list[str]:
    """Return the references of the installed packages that a package requires here."""
    parsed = [Requirement(each) for each in package.requires or ()]
    needed = [each for each in parsed if not each.marker or each.marker.evaluate({"extra": ""})]
    names = {re.sub("[-_.]+", "-", each.name).lower() for each in needed}
    return sorted(references[name] for name in names & references.keys())


def component(package: Distribution) -> dict[str, Json]:
    url = purl(package.metadata["Name"], package.version)
    name, summary = package.metadata["Name"], package.metadata.get("Summary", "")
    return {
        "type": "library",
        "bom-ref": url,
        "name": name,
        "version": package.version,
        "description": summary,
        "licenses": license_of(package),
        "purl": url,
    }


def document(project: Mapping[str, str], packages: Iterable[Distribution]) -> dict[str, Json]:
    """Return the document of a project and the packages that are installed for it."""
    found = {purl(each.metadata["Name"], each.version): each for each in packages}
    references = {url.rpartition("/")[2].partition("@")[0]: url for url in found}
    own = purl(project["name"], project["version"])
    others = sorted(found.keys() - {own})
    graph: list[Json] = [{"ref": own, "dependsOn": list(others)}]
    graph += [{"ref": url, "dependsOn": [*requirements(found[url], references)]} for url in others]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(graph))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "description": project["description"],
                "licenses": [{"expression": project["license"]}],
                "purl": own,
            }
        },
        "components": [component(found[url]) for url in others],
        "dependencies": graph,
    }


if __name__ == "__main__":
    pyproject, *folders = sys.argv[1:]
    project = tomllib.loads(Path(pyproject).read_text())["project"]
    print(json.dumps(document(project, distributions(path=folders)), indent=1))
