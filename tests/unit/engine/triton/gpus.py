"""GPUs that the tests compile kernels for, on a machine without them."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = [
    "DEPENDENT_FROM",
    "OF_EACH_MEMORY",
    "SHARED_MEMORY",
    "Compiled",
    "compile_kernel",
    "inspect",
]

SHARED_MEMORY = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may take, by compute capability.

A100, L4, H100, B200 and RTX 5090 are GPUs of these capabilities. An A100 has 163 KB, but other GPUs
of its generation (8.6) have 99 KB.
"""
DEPENDENT_FROM = 90
"""Least compute capability with programmatic dependent launch"""
OF_EACH_MEMORY = (80, 90)
"""A compute capability with the least shared memory, and one with the most"""
WEIGHTS = {"weight", "codes"}
"""Parameters that a kernel may read before those in front of it have ended"""
_MOST_STACK = 128
"""Most bytes of a thread's stack: registers that are spilled"""
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's machine code for one GPU."""

    kernel: str
    capability: int
    what: str
    """Shapes and types that it was compiled for"""
    ptx: str
    parameters: tuple[str, ...]
    """Parameters of the machine code that are pointers; "" for others"""
    is_dependent: bool
    """True if the kernel may start before those in front of it have ended"""
    shared: int
    """Bytes of shared memory that a program takes"""
    registers: int
    stack: int
    """Bytes of a thread's stack"""

    @property
    def is_pipelined(self) -> bool:
        """True if the kernel loads operands while it computes."""
        return "cp.async" in self.ptx

    @property
    def early_reads(self) -> set[str]:
        """Names of the pointers that a dependent kernel reads before it waits."""
        return set(reads_before_wait(self.ptx, self.parameters))

    def check(self, *, pipelined: bool = False) -> None:
        """Raise AssertionError if the GPU could not launch the kernel, or would run it slowly.

        pipelined: whether the kernel must load operands while it computes.
        """
        assert self.shared <= SHARED_MEMORY[self.capability], self
        assert self.stack <= _MOST_STACK, self
        assert self.is_pipelined or not pipelined, self
        if self.is_dependent:
            assert self.early_reads <= WEIGHTS, self
        else:
            assert "griddepcontrol" not in self.ptx, self

    def __str__(self) -> str:
        sizes = f"{self.shared} {self.registers} {self.stack}"
        return f"{self.kernel} sm_{self.capability} {sizes} {self.what}"


def compile_kernel(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: tuple[str, ...] = (),
    **options: int | bool,
) -> Compiled:
    """Compile a kernel for a GPU of this compute capability, with the assembler that Triton takes.

    types: Triton's type of each parameter that is not among `constants`. aligned: parameters whose
    addresses are multiples of 16 bytes.
    """
    names = kernel.arg_names
    constants = dict(constants)
    if "is_dependent" in names:
        constants["is_dependent"] = capability >= DEPENDENT_FROM
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    if constants.get("is_dependent"):
        options |= {"launch_pdl": True}
    compiled = triton.compile(source, target=target, options=options)
    return inspect(compiled, capability, f"{sorted(set(types.values()))} {constants} {options}")


def inspect(compiled: Any, capability: int, what: str) -> Compiled:
    """Describe a kernel that Triton has compiled."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parameters: list[str] = []
    for name, kind in compiled.src.signature.items():
        if kind.startswith("tensordesc"):  # the descriptor, and a size and a stride by dimension
            parameters += [""] * (3 + 2 * kind.count(","))
        elif kind != "constexpr":
            parameters.append(name if kind.startswith("*") else "")
    used = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert used is not None, said
    return Compiled(
        compiled.metadata.name,
        capability,
        what,
        compiled.asm["ptx"],
        tuple(parameters),
        compiled.metadata.launch_pdl,
        compiled.metadata.shared,
        registers=int(used[1]),
        stack=int(used[2]),
    )


def reads_before_wait(ptx: str, parameters: tuple[str, ...]) -> Iterator[str]:
    """Yield the pointers whose memory a kernel reads before it waits for those in front of it.

    Raises AssertionError if it does not wait, or branches or writes before: then some program may
    end without waiting, or overwrite what the kernel in front still reads.
    """
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    assert wait, "no program waits"
    sources: dict[str, set[str]] = {}
    """Pointers from which the present number of a register follows"""
    for line in before[before.index(".reqntid") :].splitlines()[2:]:
        code = line.partition("//")[0].strip()
        operation, *operands = re.findall(r"[%@$\w.]+", code) or [""]
        if operation.startswith("@"):
            operation, *operands = operands
        assert not operation.startswith(("bra", "ret", "exit", "st.", "red.", "atom.")), code
        read = {parameters[int(each)] for each in re.findall(r"_param_(\d+)", code)} - {""}
        read = read.union(*(sources.get(each, set()) for each in operands))
        if operation.startswith(("ld.global", "prefetch.global", "cp.async")):
            yield from read
        if operands:
            sources[operands[0]] = read
