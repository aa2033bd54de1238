"""The documents name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
_PATH = re.compile(
    r"`((?:benchmarks|deploy|docs|examples|models|protos|services|tests|tokenwire)/[\w./-]*)`"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_in_a_document_exists(document: Path) -> None:
    paths = set(_PATH.findall(document.read_text())) - {"tokenwire/pb"}  # generated
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
