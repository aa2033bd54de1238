"""Functions of the compiled kernels, with their enumerations. src/kernels.h documents them."""

import ctypes
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch

from services.engine.kernels.shared_library import loaded
from services.engine.kernels.structures import (
    AdaptCall,
    ArrangeCall,
    AttentionCall,
    CodesCall,
    DeltaRuleCall,
    DrawCall,
    FloatCall,
    GateCall,
    GroupedCall,
    KeepCall,
    LatentCall,
    LayerNormCall,
    LinearCall,
    MixtureCall,
    NormCall,
    NumbersCall,
    OperationCall,
    PassCall,
    RotationCall,
    RoutingCall,
    RowNormCall,
    ScaleCall,
    ScoreCall,
    SelectiveCall,
    StateScanCall,
)

__all__ = [
    "DTYPES",
    "Arrangement",
    "Epilogue",
    "Format",
    "InstructionSet",
    "Kernel",
    "Native",
    "Numbers",
    "instruction_set",
    "instruction_set_name",
    "limit_instruction_set",
    "native",
]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Numbers of the dtypes; enum tw_dtype"""


class InstructionSet(IntEnum):
    """Instruction sets, each with all before it; enum tw_instructions."""

    BASELINE = 0
    AVX2 = 1
    NEON = 1  # on aarch64, in the place of AVX2
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


class Epilogue(IntEnum):
    """Last operation on a product; enum tw_epilogue."""

    STORE = 0
    ADD = 1
    GATE = 2
    STORE_FLOAT32 = 3
    ARGMAX = 4
    GELU = 5
    GELU_TANH = 6
    GATE_GELU = 7
    GATE_GELU_TANH = 8
    GATE_CLAMPED = 9


class Numbers(IntEnum):
    """Forms of the scales and offsets of groups; enum of TW_FLOATS."""

    FLOATS = 0
    HALVES = 1
    LEVELS = 2
    EXPONENTS = 3


class Format(IntEnum):
    """Format of packed weights; enum tw_format."""

    PACKED = 0
    INT8 = 1
    CODED = 2
    GROUPS = 3
    BYTES = 4


class Arrangement(IntEnum):
    """Effect of rows on the numbers at their target; enum tw_arrangement."""

    COPY = 0
    MULTIPLY = 1
    MULTIPLY_BY_SIGMOID = 2
    MULTIPLY_BY_SOFTPLUS = 3
    ADD_ROWS = 4


class Kernel(IntEnum):
    """Kernels of a layer; enum tw_kernel."""

    NORM = 0
    LINEAR = 1
    ROTATION = 2
    ATTENTION = 3
    KEEP = 4
    ROW_NORM = 5
    GROUPED_LINEAR = 6
    GATE_ROWS = 7
    PAGED_ATTENTION = 8
    DELTA_RULE = 9
    ARRANGE = 10
    MIXTURE = 11
    STATE_SCAN = 12
    SCALE = 13
    FLOAT_LINEAR = 14
    LATENT_DECODE = 15


class Native:
    """Functions of the library, with their C types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            try:
                found = library[name]
            except AttributeError:  # compiled for another processor architecture
                return _missing
            found.restype, found.argtypes = result, arguments
            call: Callable[..., int] = found
            return call

        size = c_int64
        self.instruction_set = function("tw_instruction_set", c_int32)
        self.limit_instruction_set = function("tw_limit_instruction_set", c_int32, c_int32)
        self.use_pool = function("tw_use_pool", None, size)
        self.layer_norm = function("tw_tiled_layer_norm", None, POINTER(LayerNormCall))
        self.rotate = function("tw_rotate", None, POINTER(RotationCall))
        self.draw_tokens = function("tw_draw_tokens", None, POINTER(DrawCall), size, size)
        self.score_tokens = function("tw_score_tokens", None, POINTER(ScoreCall), size, size, size)
        self.adapt = function("tw_adapt_rows", None, POINTER(AdaptCall))
        self.selective_convolve = function("tw_selective_convolve", None, POINTER(SelectiveCall))
        self.selective_scan = function("tw_selective_scan", None, POINTER(SelectiveCall))
        self.grouped_bytes = function("tw_grouped_bytes", size, POINTER(GroupedCall))
        self.grouped_pack = function(
            *("tw_grouped_pack", None, POINTER(GroupedCall), POINTER(CodesCall)),
            *(POINTER(NumbersCall), POINTER(NumbersCall), c_void_p, size, size),
        )
        self.choose_experts = function(
            *("tw_choose_experts", None, POINTER(RoutingCall), c_void_p, size, c_void_p, c_void_p)
        )
        self.float_packed_elements = function("tw_float_packed_elements", size, size, size)
        self.float_pack = function(
            "tw_float_pack", None, c_int32, c_void_p, size, c_void_p, size, size
        )
        self.packed_elements = function("tw_tiled_packed_elements", size, size, size)
        self.pack = function(
            "tw_tiled_pack", None, c_int32, c_void_p, c_void_p, size, size, size, size
        )
        self.pack_int8 = function(
            *("tw_tiled_pack_int8", None, c_int32, c_void_p, c_void_p, c_void_p),
            *(size, size, size, size),
        )
        self.pack_bytes = function(
            "tw_tiled_pack_bytes", None, c_void_p, c_void_p, size, size, size, size
        )
        self.code = function("tw_tiled_code", size, c_void_p, size, c_void_p, size)
        self.replay = function("tw_replay", None, POINTER(OperationCall), size, POINTER(PassCall))
        self._kernels = {
            Kernel.NORM: function("tw_tiled_rms_norm", None, POINTER(NormCall)),
            Kernel.LINEAR: function("tw_tiled_linear", None, POINTER(LinearCall)),
            Kernel.ROTATION: self.rotate,
            Kernel.ATTENTION: function("tw_tiled_attend", None, POINTER(AttentionCall)),
            Kernel.KEEP: function("tw_keep_rows", None, POINTER(KeepCall)),
            Kernel.ROW_NORM: function("tw_norm_rows", None, POINTER(RowNormCall)),
            Kernel.GROUPED_LINEAR: function("tw_grouped_linear", None, POINTER(GroupedCall)),
            Kernel.GATE_ROWS: function("tw_gate_rows", None, POINTER(GateCall)),
            Kernel.PAGED_ATTENTION: function("tw_paged_attend", None, POINTER(AttentionCall)),
            Kernel.DELTA_RULE: function("tw_delta_rule", None, POINTER(DeltaRuleCall)),
            Kernel.ARRANGE: function("tw_arrange_rows", None, POINTER(ArrangeCall)),
            Kernel.MIXTURE: function("tw_mix_experts", None, POINTER(MixtureCall)),
            Kernel.STATE_SCAN: function("tw_state_scan", None, POINTER(StateScanCall)),
            Kernel.SCALE: function("tw_scale_rows", None, POINTER(ScaleCall)),
            Kernel.FLOAT_LINEAR: function("tw_float_linear", None, POINTER(FloatCall)),
            Kernel.LATENT_DECODE: function("tw_latent_decode", None, POINTER(LatentCall)),
        }
        self._recorder = _Recorder()

    def run(self, kernel: Kernel, call: ctypes.Structure) -> None:
        """Run one of a layer's kernels."""
        if self._recorder.operations is not None:
            self._recorder.operations.append(_operation(kernel, call))
        self._kernels[kernel](byref(call))

    @contextmanager
    def recorded(self) -> Iterator[list[OperationCall]]:
        """Collect the kernels that this thread runs within the context."""
        operations: list[OperationCall] = []
        self._recorder.operations = operations
        try:
            yield operations
        finally:
            self._recorder.operations = None


class _Recorder(threading.local):
    operations: list[OperationCall] | None = None


def _operation(kernel: Kernel, call: ctypes.Structure) -> OperationCall:
    operation = OperationCall(kernel=kernel)
    setattr(operation, kernel.name.lower(), call)  # a copy
    return operation


def _missing(*_: object) -> int:
    raise NotImplementedError("the kernel library was compiled without this function")


native: Native | None = None if loaded is None else Native(loaded)
"""Functions of the library; None if the package was built without a compiler"""


def instruction_set() -> InstructionSet | None:
    """Return the instruction set in use; None if the kernels were not built."""
    return None if native is None else InstructionSet(native.instruction_set())


def instruction_set_name() -> str:
    """Return the name of the instruction set in use: "avx512"; "none" without the kernels."""
    found = instruction_set()
    if found is None:
        return "none"
    is_neon = found == InstructionSet.NEON and platform.machine() in ("aarch64", "arm64")
    return "neon" if is_neon else found.name.lower()


@contextmanager
def limit_instruction_set(highest: InstructionSet) -> Iterator[None]:
    """Limit the kernels to `highest` within the context, as on an older machine."""
    if native is not None:
        native.limit_instruction_set(highest)
    try:
        yield
    finally:
        if native is not None:
            native.limit_instruction_set(max(InstructionSet))
