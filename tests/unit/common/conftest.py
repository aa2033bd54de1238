"""Texts that tokenizers are compared on."""

import random
import sysconfig
from pathlib import Path

import pytest

LINES = 10_000
"""Different lines"""
CODE = 7_500
"""Lines of code and prose among them"""


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Lines of code and prose, and lines of random Unicode."""
    source = random.Random(1)
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.rglob("*.py") if path.stat().st_size > 10_000)
    code: dict[str, None] = {}
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        code |= dict.fromkeys(text.splitlines(keepends=True))
        if len(code) > CODE:
            break
    lines = [*code][:CODE]
    letters = [
        chr(code)
        for code in (*range(0x20, 0x2000), *range(0x3040, 0x9FFF, 7), *range(0x1F300, 0x1F6FF))
        if chr(code).isprintable() or chr(code).isspace()
    ]
    words = ["don't", "WE'LL", " 12345", "\t\t", "  \n", "naïve", "…", "_x1", "ﬁ", "\r\n"]
    while len(lines) < LINES:
        line = source.choices(letters, k=source.randrange(1, 12)) + source.choices(words, k=2)
        source.shuffle(line)
        lines.append("".join(line))
    return lines
