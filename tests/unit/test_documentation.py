"""Links, paths and flags in the documentation."""

import dataclasses
import re
from pathlib import Path

import pytest

from tokenwire.cli import main
from tokenwire.serving.service_flags import SETTINGS

ROOT = Path(__file__).parents[2]
DOCS = [page for page in ROOT.glob("docs/**/*.md") if "generated" not in page.parts]
PAGES = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *DOCS]
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "models", "protos", "services", "tests")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """A newcomer finds the code by the names that the documentation gives."""
    for name in re.findall(r"`([\w./-]+/[\w.-]*)`", page.read_text(encoding="utf-8")):
        if name.endswith(".py") or name.split("/")[0] in FOLDERS:
            assert (ROOT / name).exists() or list(ROOT.glob(f"services/*/{name}")), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_both_sides_of_a_conflict(page: Path) -> None:
    marks = re.findall(r"^(<{7}|>{7}|={7})( |$)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert marks == []


def test_map_has_every_folder_of_code() -> None:
    """A newcomer finds the place of a change in the map, where three folders were missing."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = page.partition("\n## Map\n")[2].partition("\n## ")[0]
    named = {Path(path).name for path in re.findall(r"`([\w./]+)/`", rows)}
    modules = [*ROOT.glob("services/*/**/*.py"), *ROOT.glob("tokenwire/**/*.py")]
    folders = {module.parent.relative_to(ROOT) for module in modules}
    inner = {folder for folder in folders if "pb" not in folder.parts and len(folder.parts) > 1}
    services = {
        Path("services", name) for name in ("engine", "grammar", "http_shim", "jobs", "tokenizer")
    }
    assert [folder for folder in inner - services if folder.name not in named] == []


def test_every_flag_of_the_services_stands_in_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    """An operator who searches the pages for what --help prints finds what it is for."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert "--no-restart" in flags
    for settings in SETTINGS.values():
        flags |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(settings)}
    text = "".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *DOCS])
    assert sorted(flags - set(re.findall(r"--[a-z0-9-]+", text))) == []
