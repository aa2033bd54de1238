"""Build of the kernels: python -m services.engine.kernels.build [OUTPUT].

Without OUTPUT, the library of this checkout is compiled unless it is current.
"""

import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIBRARY", "build", "is_current"]

_SOURCES = Path(__file__).parent / "src"

LIBRARY = Path(__file__).parent / "libtokenwire_kernels.so"
"""Path of the compiled library"""

# No -ffast-math: loops that may reorder sums say so with "omp simd". -Wno-uninitialized because
# GCC 12 warns about its own intrinsics.
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-pthread", "-fno-exceptions", "-fno-rtti"),
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    *("-fno-math-errno", "-fno-trapping-math"),
)


@dataclass(frozen=True, slots=True)
class _Unit:
    """One compilation of a source for one instruction set."""

    source: str
    flags: tuple[str, ...] = ()
    defines: str = ""


_ANYWHERE = (
    _Unit("dispatch.cpp"),
    _Unit("threads.cpp"),
    _Unit("portable.cpp", defines="TW_TABLE=portable_baseline"),
    _Unit("draw.cpp", defines="TW_DRAW=draw_baseline"),
    _Unit("score.cpp", defines="TW_SCORE=score_baseline"),
    _Unit("delta_rule.cpp", defines="TW_DELTA=delta_baseline"),
    _Unit("latent_attention.cpp", defines="TW_LATENT=latent_baseline"),
    _Unit("state_scan.cpp", defines="TW_SCAN=scan_baseline"),
    _Unit("selective_scan.cpp", defines="TW_SELECTIVE(stage)=selective_##stage##_baseline"),
    _Unit("grouped.cpp", defines="TW_GROUPED=grouped_baseline"),
    _Unit("experts.cpp", defines="TW_EXPERTS=experts_baseline"),
    _Unit("grouped_pack.cpp"),
    _Unit("float_linear.cpp", defines="TW_MULTIPLY_FLOATS=float_linear_baseline"),
    _Unit("float_pack.cpp"),
    _Unit("paged_attention.cpp", defines="TW_PAGED=paged_baseline"),
    _Unit("mapped.cpp", defines="TW_MAPPED=mapped_baseline"),
    _Unit("mapped_pages.cpp"),
    _Unit("mixture.cpp"),
    _Unit("replay.cpp"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
)
_VNNI = ("-mavx512vnni",)
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi")
_AMX = (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_NAMES_OF_X86_64 = ("x86_64", "AMD64")
_X86_64_FLAGS = ("-DTW_X86_64",)
"""Flags of all units where those of `_X86_64` are compiled"""
_X86_64 = (
    _Unit("portable.cpp", _AVX2, "TW_TABLE=portable_avx2"),
    _Unit("portable.cpp", _AVX512, "TW_TABLE=portable_avx512"),
    _Unit("draw.cpp", _AVX2, "TW_DRAW=draw_avx2"),
    _Unit("draw.cpp", _AVX512, "TW_DRAW=draw_avx512"),
    _Unit("score.cpp", _AVX2, "TW_SCORE=score_avx2"),
    _Unit("score.cpp", _AVX512, "TW_SCORE=score_avx512"),
    _Unit("delta_rule.cpp", _AVX2, "TW_DELTA=delta_avx2"),
    _Unit("delta_rule.cpp", _AVX512, "TW_DELTA=delta_avx512"),
    _Unit("latent_attention.cpp", _AVX2, "TW_LATENT=latent_avx2"),
    _Unit("latent_attention.cpp", _AVX512, "TW_LATENT=latent_avx512"),
    _Unit("state_scan.cpp", _AVX2, "TW_SCAN=scan_avx2"),
    _Unit("state_scan.cpp", _AVX512, "TW_SCAN=scan_avx512"),
    _Unit("selective_scan.cpp", _AVX2, "TW_SELECTIVE(stage)=selective_##stage##_avx2"),
    _Unit("selective_scan.cpp", _AVX512, "TW_SELECTIVE(stage)=selective_##stage##_avx512"),
    _Unit("experts.cpp", _AVX2, "TW_EXPERTS=experts_avx2"),
    _Unit("experts.cpp", _AVX512, "TW_EXPERTS=experts_avx512"),
    _Unit("grouped.cpp", _AVX2, "TW_GROUPED=grouped_avx2"),
    _Unit("grouped.cpp", (*_AVX2, "-mavxvnni"), "TW_GROUPED=grouped_avx_vnni"),
    _Unit("grouped.cpp", (*_AVX512, *_VNNI), "TW_GROUPED=grouped_vnni"),
    _Unit("float_linear.cpp", _AVX2, "TW_MULTIPLY_FLOATS=float_linear_avx2"),
    _Unit("float_linear.cpp", _AVX512, "TW_MULTIPLY_FLOATS=float_linear_avx512"),
    _Unit("paged_attention.cpp", _AVX2, "TW_PAGED=paged_avx2"),
    _Unit("paged_attention.cpp", _AVX512, "TW_PAGED=paged_avx512"),
    _Unit("mapped.cpp", _AVX2, "TW_MAPPED=mapped_avx2"),
    _Unit("mapped.cpp", _AVX512, "TW_MAPPED=mapped_avx512"),
    _Unit("pack.cpp", _AVX512_BF16),
    _Unit("coded.cpp", _AVX512_BF16),
    _Unit("avx512_linear.cpp", _AVX512_BF16),
    _Unit("amx_linear.cpp", _AMX),
    _Unit("amx_linear_decoded.cpp", _AMX),
    _Unit("tiled_groups.cpp", (*_AVX512_BF16, *_VNNI)),
    _Unit("tiled_bytes.cpp", (*_AVX512_BF16, *_VNNI)),
    _Unit("tiled_attention.cpp", _AVX512_BF16, "TW_ATTEND=avx512_attend"),
    _Unit("tiled_attention.cpp", _AMX, "TW_ATTEND=amx_attend"),
    _Unit("tiled_norms.cpp", _AVX512_BF16),
    _Unit("tiled.cpp"),
)
_NAMES_OF_AARCH64 = ("aarch64", "arm64")
# NEON is part of the architecture: the units without flags use it.
_AARCH64 = (
    _Unit("grouped.cpp", ("-march=armv8.2-a+dotprod",), "TW_GROUPED=grouped_dot"),
    _Unit("grouped.cpp", ("-march=armv8.2-a+dotprod+i8mm",), "TW_GROUPED=grouped_i8mm"),
)


def build(output: Path = LIBRARY) -> Path:
    """Compile the kernels for every instruction set into one shared library at `output`.

    The library picks the instruction set at run time, so it runs on any processor of the
    architecture. The build needs a C++17 compiler with OpenMP: CXX, else the one that built Python,
    else c++. Raises OSError without a compiler and subprocess.CalledProcessError if it fails.
    """
    compiler = _compiler()
    machine = _target_of(compiler)
    units = _units(machine)
    flags = _FLAGS + (_X86_64_FLAGS if machine in _NAMES_OF_X86_64 else ())
    with tempfile.TemporaryDirectory() as scratch:
        identity = Path(scratch) / "identity.cpp"
        identity.write_text(_identity(machine))
        units += (_Unit(str(identity)),)
        objects = [Path(scratch) / f"{index}.o" for index in range(len(units))]

        def compile_unit(unit: _Unit, to: Path) -> None:
            defines = [f"-D{unit.defines}"] if unit.defines else []
            source = str(_SOURCES / unit.source)
            command = [*compiler, *flags, *unit.flags, *defines, "-c", source, "-o", str(to)]
            subprocess.run(command, check=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_unit, units, objects))
        output.parent.mkdir(parents=True, exist_ok=True)
        linked = Path(scratch) / output.name
        subprocess.run(
            [*compiler, "-shared", "-fopenmp", "-pthread", *map(str, objects), "-o", str(linked)],
            check=True,
        )
        # Replace the file in one step: running processes keep the old one.
        fresh = output.with_suffix(".new")
        fresh.write_bytes(linked.read_bytes())
        fresh.chmod(0o755)
        fresh.replace(output)
    return output


def is_current(library: Path) -> bool:
    """Return whether a library was compiled from the sources beside this file, if there are any."""
    if not _SOURCES.is_dir():
        return True
    return _fingerprint(platform.machine()).encode() in library.read_bytes()


def _fingerprint(machine: str) -> str:
    """Return the library's fingerprint, over its machine, flags and sources."""
    built = ((sys.platform, machine), _FLAGS, _X86_64_FLAGS, _units(machine))
    digest = hashlib.sha256(repr(built).encode())
    for source in sorted([*_SOURCES.glob("[a-z]*.cpp"), *_SOURCES.glob("[a-z]*.h")]):
        digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return f"tokenwire kernels {digest.hexdigest()}"


def _identity(machine: str) -> str:
    """Return the source text of the library's fingerprint and header."""
    header = (_SOURCES / "kernels.h").read_text(encoding="utf-8")
    return (
        f'extern "C" const char tw_fingerprint[] = "{_fingerprint(machine)}";\n'
        f'extern "C" const char tw_header[] = R"header({header})header";\n'
    )


def _units(machine: str) -> tuple[_Unit, ...]:
    """Return the compilations for a machine, such as x86_64 or aarch64."""
    if machine in _NAMES_OF_X86_64:
        return _ANYWHERE + _X86_64
    return _ANYWHERE + (_AARCH64 if machine in _NAMES_OF_AARCH64 else ())


def _target_of(compiler: list[str]) -> str:
    """Return the machine that a compiler compiles for; it need not be this one."""
    done = subprocess.run([*compiler, "-dumpmachine"], check=True, capture_output=True, text=True)
    return done.stdout.partition("-")[0]


def _compiler() -> list[str]:
    return (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(build(Path(sys.argv[1])))
    elif not LIBRARY.exists() or not is_current(LIBRARY):
        print(build())
