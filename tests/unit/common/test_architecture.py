"""The architecture: the folders that each folder of services/ and tokenwire/ may import.

A service has top-level modules and rooms (folders). A room may import rooms of lower layers, and
top-level modules such as `settings` and `messages`. No room imports the modules of the top floor,
which assemble the service.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
SERVICES = [
    f"services.{name}" for name in ("common", "http_shim", "jobs", "tokenizer", "engine", "grammar")
]
OF_SERVE = [f"tokenwire.serving.{name}" for name in ("model_facts", "service_flags", "start_check")]
"""Modules of `tokenwire serve` that import the services' settings and checks"""
PACKAGES = {
    "tokenwire": [],
    "tokenwire.serving": ["services.common", "tokenwire", *OF_SERVE],
    **{name: ["tokenwire", "tokenwire.serving", *OF_SERVE, *SERVICES] for name in OF_SERVE},
    "tokenwire.cli": ["services.common", "tokenwire", "tokenwire.serving", *OF_SERVE],
    "tokenwire.__main__": ["tokenwire.cli"],
    "services.common": ["tokenwire"],
    "services.http_shim": ["services.common", "tokenwire"],
    "services.jobs": ["services.common", "services.jobs.answering", "tokenwire"],
    "services.jobs.answering": [
        *("services.common", "services.http_shim", "services.jobs", "tokenwire")
    ],
    "services.tokenizer": ["services.common", "tokenwire"],
    "services.engine": ["services.common", "tokenwire"],
    "services.grammar": ["services.common", "tokenwire"],
}
"""The other packages that each package may import"""
LAYERS = {
    "services.http_shim": [
        "documentation",
        "ollama",
        "vectors",
        "endpoints",
        "jobs",
        "http",
        "dialects.completions dialects.chat dialects.messages dialects.responses dialects.ollama",
        "dialects",
        "backends documents",
        "images",
    ],
    "services.jobs": ["batches documents responses", "store"],
    "services.tokenizer": [
        "vllm_api",
        "chat",
        "chat.template",
        "chat.answer",
        "embedding",
        "completion",
        "images",
        "engines",
        "text",
    ],
    "services.engine": [
        "frontend",
        "loop vision",
        "execution",
        "model.transformers_code",
        "model scheduling",
        "model.mixers",
        "model.parts",
        "model.adapters",
        "model.operators",
        "model.attention",
        "model.architecture sampling",
        "batch model.checkpoint ranks",
        "kernels",
    ],
    "services.grammar": ["compiling", "matching", "schemas", "patterns"],
}
"""The rooms of each service by layer, from the top; rooms of one layer don't import each other"""
TOP_FLOOR = re.compile(r"__main__|application|app|\w+_service")


class Import(NamedTuple):
    """An import of a module of the tree by another."""

    place: str
    source: str
    target: str


def _modules() -> dict[str, Path]:
    """Return the hand-written modules by name."""
    paths = [path for top in ("services", "tokenwire") for path in (ROOT / top).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {
        name.removesuffix(".__init__"): path
        for name, path in names.items()
        if not name.startswith("tokenwire.pb.")
    }


MODULES = _modules()


@cache
def _imports() -> list[Import]:
    return list(_read_imports())


def _read_imports() -> Iterator[Import]:
    for source, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                targets = {name if name in MODULES else node.module for name in names}
            else:
                continue
            for target in sorted(targets & MODULES.keys()):
                yield Import(f"{path.relative_to(ROOT)}:{node.lineno}", source, target)


def _package(module: str) -> str:
    found = [name for name in PACKAGES if f"{module}.".startswith(f"{name}.")]
    return max(found, key=len, default=module)


def _unit(module: str) -> str:
    """Return the room of a module, or the module itself where it is at the top level."""
    is_folder = MODULES[module].name == "__init__.py"
    folder = module if is_folder else module.rpartition(".")[0]
    return module if folder == _package(module) or module in PACKAGES else folder


def _rooms() -> set[str]:
    units = {module: _unit(module) for module in MODULES}
    return {unit for module, unit in units.items() if _package(module) in LAYERS and unit != module}


def _layer(unit: str) -> int | None:
    """Return the layer of a room, 0 for the top, or None for a top-level module."""
    package = _package(unit)
    layers = [[f"{package}.{room}" for room in rooms.split()] for rooms in LAYERS.get(package, ())]
    return next((number for number, rooms in enumerate(layers) if unit in rooms), None)


def _is_allowed(source: str, target: str) -> bool:
    """Return whether a unit may import another one."""
    if _package(source) != _package(target):
        return _package(target) in PACKAGES.get(_package(source), ())
    upper, lower = _layer(source), _layer(target)
    if lower is not None:
        return source == target or upper is None or upper < lower
    return upper is None or TOP_FLOOR.fullmatch(target.rpartition(".")[2]) is None


def test_every_room_has_a_layer() -> None:
    assert _rooms() == {
        f"{service}.{room}"
        for service, layers in LAYERS.items()
        for room in " ".join(layers).split()
    }


def test_every_import_is_allowed() -> None:
    units = {_unit(module) for module in MODULES}
    faults = []
    for place, source, target in _imports():
        unit = _unit(source)
        if not _is_allowed(unit, _unit(target)):
            own = [each for each in units if _package(each) == _package(unit)]
            allowed = {each for each in own if _is_allowed(unit, each)} - {unit}
            allowed |= set(PACKAGES.get(_package(unit), ()))
            names = ", ".join(sorted(allowed)) or "nothing"
            faults.append(f"{place} imports {target}. {unit} may import only {names}.")
    assert not faults, "\n".join(faults)


def test_no_imports_form_a_cycle() -> None:
    """A room counts as one unit, a top-level module as one of its own."""
    graph = defaultdict(set)
    for _, source, target in _imports():
        if _unit(source) != _unit(target):
            graph[_unit(source)].add(_unit(target))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"Cycle of imports: {' <- '.join(error.args[1])}.") from None
