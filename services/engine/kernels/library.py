"""ctypes binding of the compiled kernels. src/kernels.h documents every field and function."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_double, c_float, c_int8, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

import torch

from services.engine.kernels.build import LIBRARY
from services.engine.kernels.freshness import require_current

__all__ = [
    "DTYPES",
    "AdaptCall",
    "Arrangement",
    "AttentionCall",
    "BlocksCall",
    "CodesCall",
    "DeltaRuleCall",
    "DrawCall",
    "Epilogue",
    "FloatCall",
    "FloatExpertCall",
    "Format",
    "GateCall",
    "GroupedCall",
    "GroupedExpertCall",
    "InstructionSet",
    "KeepCall",
    "Kernel",
    "LatentCall",
    "LayerNormCall",
    "LinearCall",
    "LowRankCall",
    "MappedCall",
    "MixtureCall",
    "Native",
    "NormCall",
    "Numbers",
    "NumbersCall",
    "OperationCall",
    "PassCall",
    "PlaneCall",
    "RotationCall",
    "RoutingCall",
    "RowNormCall",
    "ScaleCall",
    "ScoreCall",
    "SelectiveCall",
    "StateScanCall",
    "TablesCall",
    "instruction_set",
    "limit_instruction_set",
    "native",
]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""enum tw_dtype"""


class InstructionSet(IntEnum):
    """Instruction sets, each with all before it; enum tw_instructions."""

    BASELINE = 0
    AVX2 = 1
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
    """Effect of rows on what lies in their place; enum tw_arrangement."""

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
    GROUPED = 6
    GATE = 7
    PAGED_ATTENTION = 8
    DELTA_RULE = 9
    ARRANGE = 10
    MIXTURE = 11
    STATE_SCAN = 12
    SCALE = 13
    FLOAT_LINEAR = 14
    LATENT_DECODE = 15


class DrawCall(ctypes.Structure):
    """struct tw_draw"""

    _fields_ = [
        ("logits", c_void_p),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("noise", c_double),
        ("top_k", c_int64),
        ("drawn", c_int64),
    ]


class ScoreCall(ctypes.Structure):
    """struct tw_score"""

    _fields_ = [
        ("logits", c_void_p),
        ("id", c_int64),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("rank", c_int64),
        ("logprob", c_float),
    ]


class LowRankCall(ctypes.Structure):
    """struct tw_low_rank"""

    _fields_ = [
        ("down", c_void_p),
        ("bias", c_void_p),
        ("up", c_void_p),
        ("rank", c_int64),
        ("first", c_int64),
        ("outputs", c_int64),
    ]


class AdaptCall(ctypes.Structure):
    """struct tw_adapt"""

    _fields_ = [
        ("rows", c_void_p),
        ("out", c_void_p),
        ("owners", c_void_p),
        ("parts", POINTER(LowRankCall)),
        ("starts", c_void_p),
        ("num_rows", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("out_stride", c_int64),
        ("most_rank", c_int64),
        ("num_numbers", c_int64),
        ("dtype", c_int32),
    ]


class NormCall(ctypes.Structure):
    """struct tw_norm"""

    _fields_ = [
        ("rows", c_void_p),
        ("weight", c_void_p),
        ("tiles", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("epsilon", c_float),
    ]


class LayerNormCall(ctypes.Structure):
    """struct tw_layer_norm"""

    _fields_ = [
        ("rows", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("tiles", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("epsilon", c_float),
        ("replaces", c_int32),
    ]


class RotationCall(ctypes.Structure):
    """struct tw_rotation"""

    _fields_ = [
        ("heads", c_void_p),
        ("row_stride", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("tokens", c_int64),
        ("num_query_heads", c_int64),
        ("num_key_heads", c_int64),
        ("head_dim", c_int64),
        ("epsilon", c_float),
        ("dtype", c_int32),
    ]


class AttentionCall(ctypes.Structure):
    """struct tw_attention"""

    _fields_ = [
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lengths", c_void_p),
        ("block_tables", c_void_p),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
        ("ends", c_void_p),
        ("row_stride", c_int64),
        ("table_stride", c_int64),
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("num_kv_heads", c_int64),
        ("group", c_int64),
        ("head_dim", c_int64),
        ("value_dim", c_int64),
        ("block_size", c_int64),
        ("window", c_int64),
        ("cache_group", c_int64),
        ("scale", c_float),
        ("cap", c_float),
        ("dtype", c_int32),
        ("cache_dtype", c_int32),
        ("is_tiled", c_int32),
    ]


class LatentCall(ctypes.Structure):
    """struct tw_latent"""

    _fields_ = [
        ("queries", c_void_p),
        ("latents", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        ("pages", c_void_p),
        ("slots", c_void_p),
        ("context_lengths", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("heads", c_int64),
        ("latent_width", c_int64),
        ("key_width", c_int64),
        ("shared_width", c_int64),
        ("value_width", c_int64),
        ("page_width", c_int64),
        ("block_size", c_int64),
        ("cache_group", c_int64),
        ("scale", c_float),
        ("dtype", c_int32),
    ]


class DeltaRuleCall(ctypes.Structure):
    """struct tw_delta"""

    _fields_ = [
        ("mixed", c_void_p),
        ("gate", c_void_p),
        ("beta", c_void_p),
        ("decay", c_void_p),
        ("out", c_void_p),
        ("convolution", c_void_p),
        ("convolution_bias", c_void_p),
        ("rates", c_void_p),
        ("decay_bias", c_void_p),
        ("norm", c_void_p),
        ("windows", c_void_p),
        ("recurrent", c_void_p),
        ("starts", c_void_p),
        ("sources", c_void_p),
        ("targets", c_void_p),
        ("runs", c_int64),
        ("mixed_stride", c_int64),
        ("gate_stride", c_int64),
        ("beta_stride", c_int64),
        ("decay_stride", c_int64),
        ("out_stride", c_int64),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("conv_width", c_int64),
        ("epsilon", c_float),
        ("least_decay", c_float),
        ("is_silu", c_int32),
        ("decays_channels", c_int32),
        ("doubles_beta", c_int32),
        ("dtype", c_int32),
        ("state_dtype", c_int32),
    ]


class StateScanCall(ctypes.Structure):
    """struct tw_scan"""

    _fields_ = [
        ("gate", c_void_p),
        ("mixed", c_void_p),
        ("steps", c_void_p),
        ("out", c_void_p),
        ("convolved", c_void_p),
        ("scanned", c_void_p),
        ("convolution", c_void_p),
        ("convolution_bias", c_void_p),
        ("rates", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
        ("windows", c_void_p),
        ("states", c_void_p),
        ("starts", c_void_p),
        ("sources", c_void_p),
        ("targets", c_void_p),
        ("runs", c_int64),
        ("gate_stride", c_int64),
        ("mixed_stride", c_int64),
        ("steps_stride", c_int64),
        ("out_stride", c_int64),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("groups", c_int64),
        ("state_width", c_int64),
        ("conv_width", c_int64),
        ("norm_width", c_int64),
        ("epsilon", c_float),
        ("least_step", c_float),
        ("most_step", c_float),
        ("norms_first", c_int32),
        ("dtype", c_int32),
        ("state_dtype", c_int32),
    ]


class SelectiveCall(ctypes.Structure):
    """struct tw_selective"""

    _fields_ = [
        ("mixed", c_void_p),
        ("convolved", c_void_p),
        ("gate", c_void_p),
        ("steps", c_void_p),
        ("opened", c_void_p),
        ("closed", c_void_p),
        ("out", c_void_p),
        ("convolution", c_void_p),
        ("convolution_bias", c_void_p),
        ("rates", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("windows", c_void_p),
        ("states", c_void_p),
        ("starts", c_void_p),
        ("sources", c_void_p),
        ("targets", c_void_p),
        ("runs", c_int64),
        ("mixed_stride", c_int64),
        ("gate_stride", c_int64),
        ("channels", c_int64),
        ("state_width", c_int64),
        ("conv_width", c_int64),
        ("dtype", c_int32),
        ("state_dtype", c_int32),
    ]


class NumbersCall(ctypes.Structure):
    """struct tw_numbers"""

    _fields_ = [("each", c_void_p), ("factors", c_void_p)]


class PlaneCall(ctypes.Structure):
    """struct tw_plane"""

    _fields_ = [
        ("first", c_int64),
        ("bytes", c_int64),
        ("run", c_int64),
        ("bits", c_int32),
        ("shift", c_int32),
    ]


class CodesCall(ctypes.Structure):
    """struct tw_codes"""

    _fields_ = [
        ("rows", c_void_p),
        ("row_bytes", c_int64),
        ("order", c_void_p),
        ("planes", POINTER(PlaneCall)),
        ("num_planes", c_int64),
        ("block_bytes", c_int64),
        ("block_codes", c_int64),
        ("lift", c_int64),
    ]


class BlocksCall(ctypes.Structure):
    """struct tw_blocks"""

    _fields_ = [
        ("codes", CodesCall),
        ("numbers", c_void_p),
        ("number_row_bytes", c_int64),
        ("number_block_bytes", c_int64),
        ("outputs", c_int64),
        ("num_rows", c_int64),
        ("form", c_int32),
        ("factor", c_float),
    ]


class MappedCall(ctypes.Structure):
    """struct tw_mapped"""

    _fields_ = [
        ("weights", POINTER(BlocksCall)),
        ("count", c_int64),
        ("alternate", c_int32),
    ]


class GroupedCall(ctypes.Structure):
    """struct tw_grouped"""

    _fields_ = [
        ("rows", c_void_p),
        ("packed", c_void_p),
        ("mapped", POINTER(MappedCall)),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("first_strip", c_int64),
        ("num_rows", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("first_output", c_int64),
        ("out_stride", c_int64),
        ("group", c_int64),
        ("bits", c_int32),
        ("numbers", c_int32),
        ("has_offsets", c_int32),
        ("has_values", c_int32),
        ("adds", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
        ("values", c_int8 * 16),
    ]


class LinearCall(ctypes.Structure):
    """struct tw_linear"""

    _fields_ = [
        ("rows", c_void_p),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("groups", POINTER(GroupedCall)),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("out_stride", c_int64),
        ("first_panel", c_int64),
        ("last_panel", c_int64),
        ("epilogue", c_int32),
        ("format", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
    ]


class KeepCall(ctypes.Structure):
    """struct tw_keep"""

    _fields_ = [
        ("rows", c_void_p),
        ("kept", c_void_p),
        ("num_kept", c_int64),
        ("row_stride", c_int64),
        ("row_bytes", c_int64),
    ]


class RowNormCall(ctypes.Structure):
    """struct tw_row_norm"""

    _fields_ = [
        ("rows", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("heads", c_int64),
        ("width", c_int64),
        ("row_stride", c_int64),
        ("epsilon", c_float),
        ("adds", c_int32),
        ("dtype", c_int32),
    ]


class ScaleCall(ctypes.Structure):
    """struct tw_scale"""

    _fields_ = [
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("factor", c_float),
        ("limit", c_float),
        ("dtype", c_int32),
    ]


class GateCall(ctypes.Structure):
    """struct tw_gate"""

    _fields_ = [
        ("both", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("out_stride", c_int64),
        ("alpha", c_float),
        ("limit", c_float),
        ("is_gelu", c_int32),
        ("dtype", c_int32),
    ]


class ArrangeCall(ctypes.Structure):
    """struct tw_arrange"""

    _fields_ = [
        ("rows", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("columns", c_int64),
        ("row_stride", c_int64),
        ("is_tiled", c_int32),
        ("arrangement", c_int32),
        ("dtype", c_int32),
    ]


class FloatCall(ctypes.Structure):
    """struct tw_float_product"""

    _fields_ = [
        ("rows", c_void_p),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("out_stride", c_int64),
        ("adds", c_int32),
        ("weight_dtype", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
    ]


class RoutingCall(ctypes.Structure):
    """struct tw_routing"""

    _fields_ = [
        ("bias", c_void_p),
        ("factors", c_void_p),
        ("experts", c_int64),
        ("per_row", c_int64),
        ("groups", c_int64),
        ("kept_groups", c_int64),
        ("group_leaders", c_int64),
        ("least_sum", c_float),
        ("scale", c_float),
        ("jitter", c_float),
        ("is_sparse", c_int32),
        ("has_sigmoids", c_int32),
        ("is_normalized", c_int32),
    ]


class GroupedExpertCall(ctypes.Structure):
    """struct tw_grouped_expert"""

    _fields_ = [("gate", GroupedCall), ("up", GroupedCall), ("down", GroupedCall)]


class FloatExpertCall(ctypes.Structure):
    """struct tw_float_expert"""

    _fields_ = [("gate", FloatCall), ("up", FloatCall), ("down", FloatCall)]


class MixtureCall(ctypes.Structure):
    """struct tw_mixture"""

    _fields_ = [
        ("rows", c_void_p),
        ("out", c_void_p),
        ("chosen", c_void_p),
        ("factors", c_void_p),
        ("router_rows", c_void_p),
        ("router", POINTER(LinearCall)),
        ("routing", POINTER(RoutingCall)),
        ("shared_router", POINTER(LinearCall)),
        ("gates", POINTER(LinearCall)),
        ("downs", POINTER(LinearCall)),
        ("grouped", POINTER(GroupedExpertCall)),
        ("floats", POINTER(FloatExpertCall)),
        ("num_rows", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("experts", c_int64),
        ("per_row", c_int64),
        ("alpha", c_float),
        ("limit", c_float),
        ("is_gelu", c_int32),
        ("has_shared", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
    ]


class _AnyCall(ctypes.Union):
    _fields_ = [
        ("norm", NormCall),
        ("linear", LinearCall),
        ("rotation", RotationCall),
        ("attention", AttentionCall),
        ("keep", KeepCall),
        ("row_norm", RowNormCall),
        ("grouped", GroupedCall),
        ("gate", GateCall),
        ("paged_attention", AttentionCall),
        ("delta_rule", DeltaRuleCall),
        ("arrange", ArrangeCall),
        ("mixture", MixtureCall),
        ("state_scan", StateScanCall),
        ("scale", ScaleCall),
        ("float_linear", FloatCall),
        ("latent_decode", LatentCall),
    ]


class OperationCall(ctypes.Structure):
    """struct tw_operation"""

    _anonymous_ = ("call",)
    _fields_ = [("kernel", c_int32), ("call", _AnyCall)]


class TablesCall(ctypes.Structure):
    """struct tw_tables"""

    _fields_ = [
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("ends", c_void_p),
        ("kept_ends", c_void_p),
    ]


class PassCall(ctypes.Structure):
    """struct tw_pass"""

    _fields_ = [
        ("tables", POINTER(TablesCall)),
        ("query_starts", c_void_p),
        ("context_lengths", c_void_p),
        ("kept", c_void_p),
        ("kept_starts", c_void_p),
        ("state_starts", c_void_p),
        ("state_sources", c_void_p),
        ("state_targets", c_void_p),
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("num_kept", c_int64),
        ("state_runs", c_int64),
        ("seconds", POINTER(c_double)),
    ]


class Native:
    """Functions of the library, with their C types."""

    def __init__(self, path: Path) -> None:
        # The library needs libgomp.so.1, which torch has loaded: sharing it gives both one thread
        # pool, which torch.set_num_threads sizes.
        library = ctypes.CDLL(str(path))

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
            Kernel.GROUPED: function("tw_grouped_linear", None, POINTER(GroupedCall)),
            Kernel.GATE: function("tw_gate_rows", None, POINTER(GateCall)),
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


def _load() -> Native | None:
    if not LIBRARY.exists():
        return None
    require_current()
    try:
        return Native(LIBRARY)
    except OSError:
        return None  # compiled for another system


native: Native | None = _load()
"""None if the package was built without a compiler."""


def instruction_set() -> InstructionSet | None:
    """Return the instruction set in use; None if the kernels were not built."""
    return None if native is None else InstructionSet(native.instruction_set())


@contextmanager
def limit_instruction_set(highest: InstructionSet) -> Iterator[None]:
    """Have the kernels use at most `highest` within the context, as on an older machine."""
    if native is not None:
        native.limit_instruction_set(highest)
    try:
        yield
    finally:
        if native is not None:
            native.limit_instruction_set(max(InstructionSet))
