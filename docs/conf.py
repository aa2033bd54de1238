"""Settings of Sphinx, which makes a site of these pages: `make docs`."""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

_DOCS = Path(__file__).resolve().parent
_ROOT = _DOCS.parent
sys.path.insert(0, str(_DOCS))

import grpc_reference  # noqa: E402

project = "Tokenwire"
copyright = "the Tokenwire authors"  # noqa: A001
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Tokenwire"
highlight_language = "none"
smartquotes = False  # quotes are part of values: "id:variant"
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # JSON with an ellipsis

_GENERATED = _DOCS / "generated"
_OUTSIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/gpu/README.md": "gpu-check.md",
}
"""Pages elsewhere in the repository, and their names in the site"""
_FOLDERS = {"protos/tokenwire": "docs/generated/grpc.md"}
"""Folders of which the site has a page"""
_LINK = re.compile(r"\[([^\]\[]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_INDEX = """# gRPC reference

The comments of the `.proto` files, as pages. [The contract](../contract.md) has the rules that
apply to all messages.

```{toctree}
%s
```
"""


def _write_generated(_: Sphinx) -> None:
    """Write the pages that lie elsewhere, and the gRPC reference, so that neither is ever stale."""
    reference = grpc_reference.pages(_ROOT / "protos")
    texts = {f"grpc/{name}.md": text for name, text in reference.items()}
    texts["grpc.md"] = _INDEX % "\n".join(f"grpc/{name}" for name in sorted(reference))
    for source, name in _OUTSIDE.items():
        texts[name] = (_ROOT / source).read_text(encoding="utf-8")
    for name, text in texts.items():
        page = _GENERATED / name
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def _place_links(_: Sphinx, page: str, source: list[str]) -> None:
    """Turn links that work in the repository into links that work in the site."""
    place = Path(f"docs/{page}.md")
    home = place
    for outside, name in _OUTSIDE.items():
        if place == Path("docs/generated", name):
            home = Path(outside)

    def placed(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        if "://" in path or not (_ROOT / home.parent / path).exists():
            return link[0]
        target = _site_path(Path(os.path.normpath(home.parent / path)))
        if (_ROOT / target).is_dir():
            return text
        return f"[{text}]({os.path.relpath(target, place.parent)}{anchor})"

    source[0] = _LINK.sub(placed, source[0])


def _site_path(target: Path) -> Path:
    """Return the file that the site has for a path of the repository."""
    name = target.as_posix()
    if (_ROOT / target / "README.md").exists():
        return _site_path(target / "README.md")
    if name in _OUTSIDE:
        return Path("docs/generated", _OUTSIDE[name])
    return Path(_FOLDERS.get(name, name))


def setup(app: Sphinx) -> None:
    """Register the two steps."""
    app.connect("builder-inited", _write_generated)
    app.connect("source-read", _place_links)
