"""Log files: no line is lost or split, whatever moves the file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire.serving.log_file import LogFile


def _lines(count: int, start: int = 0) -> list[bytes]:
    return [b"line %d\n" % number for number in range(start, start + count)]


def test_full_file_becomes_an_old_one_and_four_files_stay(tmp_path: Path) -> None:
    """A server that runs for months must not fill the disk."""
    log = LogFile(tmp_path / "x.log", 20)
    lines = _lines(100)
    for line in lines:
        log.write(line)
    log.close()
    names = ["x.log.3", "x.log.2", "x.log.1", "x.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    kept = b"".join((tmp_path / name).read_bytes() for name in names)
    assert b"".join(lines).endswith(kept)
    assert all((tmp_path / name).stat().st_size >= 20 for name in names[:3])


@given(moves=st.lists(st.booleans(), max_size=30))
def test_no_line_is_lost_when_the_file_is_moved_before_it_is_opened_again(
    moves: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """logrotate moves the file first and sends the signal later."""
    folder = tmp_path_factory.mktemp("logs")
    log, parts = LogFile(folder / "x.log", 0), []
    for number, is_moved in enumerate(moves):
        if is_moved:
            parts.append((folder / "x.log").rename(folder / f"moved-{number}"))
        log.write(b"line %d\n" % number)
        if is_moved:
            log.reopen()
    log.close()
    text = b"".join(part.read_bytes() for part in [*parts, folder / "x.log"])
    assert text == b"".join(_lines(len(moves)))


def test_two_writers_of_a_file_rotate_it_once_and_lose_nothing(tmp_path: Path) -> None:
    """A catalog's old and new engine of a model share a log for a while."""
    path = tmp_path / "x.log"
    old, new = LogFile(path, 40), LogFile(path, 40)
    lines = _lines(8)
    for number, line in enumerate(lines):
        (old if number % 2 else new).write(line)
    text = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert sorted(text.splitlines(keepends=True)) == lines
