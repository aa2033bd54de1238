"""Arguments of the kernels: structures with the fields of those in src/kernels.h.

The library contains the text of the header with which it was compiled, and the fields are read from
there. A structure of Python therefore never differs from that of the library. The header documents
every field. Without a library, the structures have no fields.
"""

import ctypes
import re
from collections.abc import Callable
from typing import Any, TypeVar

from services.engine.kernels.shared_library import header

__all__ = [
    "AdaptCall",
    "ArrangeCall",
    "AttentionCall",
    "BlocksCall",
    "CodesCall",
    "DeltaRuleCall",
    "DrawCall",
    "FloatCall",
    "FloatExpertCall",
    "GateCall",
    "GroupedCall",
    "GroupedExpertCall",
    "KeepCall",
    "LatentCall",
    "LayerNormCall",
    "LinearCall",
    "LowRankCall",
    "MappedCall",
    "MixtureCall",
    "NormCall",
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
]

_Mirror = TypeVar("_Mirror", type[ctypes.Structure], type[ctypes.Union])

_NUMBERS: dict[str, type] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int8_t": ctypes.c_int8,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
}
_BODY = re.compile(r"(?:struct|union) (\w+) \{(.*?)\}", re.DOTALL)
_FIELD = re.compile(r"(?:const )?(\w+) (\*?)(\w+(?:, \w+)*)(?:\[(\d+)\])?")

_bodies: dict[str, str] = dict(_BODY.findall(re.sub(r"//.*", "", header())))
"""Text between the braces of each structure of the header"""
_mirrors: dict[str, type[ctypes.Structure] | type[ctypes.Union]] = {}
"""Classes of the structures that are mirrored, by name in the header"""


def mirrors(name: str) -> Callable[[_Mirror], _Mirror]:
    """Give a class the fields of a structure of the header, whose parts have classes already."""

    def fill(mirror: _Mirror) -> _Mirror:
        if _bodies:
            *fields, _ = _bodies[name].split(";")
            mirror._fields_ = [each for field in fields for each in _parse(field)]
            _mirrors[name] = mirror
        return mirror

    return fill


def _parse(declaration: str) -> list[tuple[str, type]]:
    """Return the names and types of the fields that a statement of the header declares."""
    match = _FIELD.fullmatch(" ".join(declaration.split()))
    assert match is not None, declaration
    content, is_pointer, names, length = match.groups()
    kind: Any = _mirrors[content] if content in _bodies else _NUMBERS.get(content)
    if is_pointer:  # a pointer to structures, or the address of a tensor
        kind = ctypes.POINTER(kind) if content in _bodies else ctypes.c_void_p
    elif length:
        kind = kind * int(length)
    return [(name, kind) for name in names.split(", ")]


@mirrors("tw_draw")
class DrawCall(ctypes.Structure):
    """Draw from a row of logits."""


@mirrors("tw_score")
class ScoreCall(ctypes.Structure):
    """Score of a token in a row of logits."""


@mirrors("tw_low_rank")
class LowRankCall(ctypes.Structure):
    """Part of an adapter, which adds to some neighbouring outputs of a product."""


@mirrors("tw_adapt")
class AdaptCall(ctypes.Structure):
    """Addition of adapters' parts to the outputs of a product."""


@mirrors("tw_norm")
class NormCall(ctypes.Structure):
    """RMSNorm of rows into tiles."""


@mirrors("tw_layer_norm")
class LayerNormCall(ctypes.Structure):
    """LayerNorm of rows into tiles."""


@mirrors("tw_rotation")
class RotationCall(ctypes.Structure):
    """RoPE of queries and keys."""


@mirrors("tw_attention")
class AttentionCall(ctypes.Structure):
    """Attention of one layer."""


@mirrors("tw_latent")
class LatentCall(ctypes.Structure):
    """Latent attention of one layer, for decodes."""


@mirrors("tw_delta")
class DeltaRuleCall(ctypes.Structure):
    """Gated delta rule of one layer."""


@mirrors("tw_scan")
class StateScanCall(ctypes.Structure):
    """State space scan of one layer (Mamba-2)."""


@mirrors("tw_selective")
class SelectiveCall(ctypes.Structure):
    """Selective scan of one layer (Mamba)."""


@mirrors("tw_numbers")
class NumbersCall(ctypes.Structure):
    """Scales or offsets of groups."""


@mirrors("tw_plane")
class PlaneCall(ctypes.Structure):
    """Bits of a block's codes."""


@mirrors("tw_codes")
class CodesCall(ctypes.Structure):
    """Codes of a weight."""


@mirrors("tw_blocks")
class BlocksCall(ctypes.Structure):
    """Weight in the blocks of a mapped file."""


@mirrors("tw_mapped")
class MappedCall(ctypes.Structure):
    """Weights of one shape in mapped files."""


@mirrors("tw_grouped")
class GroupedCall(ctypes.Structure):
    """Product with weights in groups."""


@mirrors("tw_linear")
class LinearCall(ctypes.Structure):
    """Product of rows in tiles."""


@mirrors("tw_keep")
class KeepCall(ctypes.Structure):
    """Move of the kept rows to the front."""


@mirrors("tw_row_norm")
class RowNormCall(ctypes.Structure):
    """RMSNorm of rows, or of their heads."""


@mirrors("tw_scale")
class ScaleCall(ctypes.Structure):
    """Product of rows with a factor."""


@mirrors("tw_gate")
class GateCall(ctypes.Structure):
    """Activation of one half of a row, times the other half."""


@mirrors("tw_arrange")
class ArrangeCall(ctypes.Structure):
    """Copy of rows to a layout, or their product with the numbers there."""


@mirrors("tw_float_product")
class FloatCall(ctypes.Structure):
    """Product with weights in floating point."""


@mirrors("tw_routing")
class RoutingCall(ctypes.Structure):
    """Rule by which scores choose a row's experts."""


@mirrors("tw_grouped_expert")
class GroupedExpertCall(ctypes.Structure):
    """Products of one expert with weights in groups."""


@mirrors("tw_float_expert")
class FloatExpertCall(ctypes.Structure):
    """Products of one expert with weights in floating point."""


@mirrors("tw_mixture")
class MixtureCall(ctypes.Structure):
    """Mixture of experts."""


@mirrors("tw_call")
class _AnyCall(ctypes.Union):
    """Call of any of a layer's kernels."""


@mirrors("tw_operation")
class OperationCall(ctypes.Structure):
    """Kernel of a recorded pass, with its call."""

    _anonymous_ = ("call",)


@mirrors("tw_tables")
class TablesCall(ctypes.Structure):
    """Places of a pass's tokens in the layers of one cache group."""


@mirrors("tw_pass")
class PassCall(ctypes.Structure):
    """Arguments that differ between passes."""
