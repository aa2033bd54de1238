"""Structures and enumerations of Python, against those of the C++ compiler."""

import ctypes
import re
import shutil
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest

import services.engine.kernels.build as builder
from services.engine.kernels import structures
from services.engine.kernels.library import (
    DTYPES,
    Arrangement,
    Epilogue,
    Format,
    InstructionSet,
    Kernel,
    Numbers,
    native,
)

HEADER = builder._SOURCES / "kernels.h"

pytestmark = pytest.mark.skipif(native is None, reason="the kernels were not built")


def test_fields_lie_where_the_compiler_puts_them(tmp_path: Path) -> None:
    """A field of another place or size is a wrong result, or a crash."""
    compiler = builder._compiler()
    if shutil.which(compiler[0]) is None:
        pytest.skip("there is no C++ compiler")
    lines = ["#include <cstddef>", f'#include "{HEADER}"']
    for name, mirror in structures._mirrors.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(mirror)});")
        for field, *_ in mirror._fields_:
            place = getattr(mirror, field)
            lines.append(f"static_assert(offsetof({name}, {field}) == {place.offset});")
            lines.append(f"static_assert(sizeof({name}::{field}) == {place.size});")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines) + "\n")
    subprocess.run([*compiler, "-std=c++17", "-fsyntax-only", str(source)], check=True)


def test_every_structure_of_the_header_has_a_class() -> None:
    assert set(structures._bodies) == set(structures._mirrors)


@pytest.mark.parametrize("mirror", [Arrangement, Epilogue, Format, InstructionSet, Kernel, Numbers])
def test_enumerators_have_the_numbers_of_the_header(mirror: type[IntEnum]) -> None:
    """Another number would run another kernel."""
    numbers = _enumerators()
    for each in mirror:
        assert numbers[f"TW_{each.name}"] == each.value


def test_dtypes_have_the_numbers_of_the_header() -> None:
    numbers = _enumerators()
    names = ("TW_FLOAT32", "TW_BFLOAT16", "TW_FLOAT16", "TW_SCALED_INT8")
    assert [numbers[name] for name in names] == list(DTYPES.values())


def test_each_kernel_has_its_call_in_a_recorded_pass() -> None:
    """`Native.run` finds the call of a kernel by its name."""
    calls = structures._mirrors["tw_call"]._fields_
    assert [each[0] for each in calls] == [each.name.lower() for each in Kernel]


def _enumerators() -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(TW_\w+) = (\d+)", HEADER.read_text())}
