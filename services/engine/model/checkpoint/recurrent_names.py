"""Tensor names of recurrent mixers besides the gated delta net."""

from dataclasses import dataclass

__all__ = [
    "ConvolutionNames",
    "GatedUnitNames",
    "LightningNames",
    "MambaNames",
    "SelectiveNames",
]


@dataclass(frozen=True, slots=True)
class ConvolutionNames:
    """Tensor names of a gated short convolution, without .weight and .bias."""

    inputs: str = "conv.in_proj"
    """Product that computes the input gate, the output gate, and the convolution's input"""
    convolution: str = "conv.conv"
    output: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class GatedUnitNames:
    """Tensor names of an RG-LRU; of products and the convolution without .weight and .bias."""

    inputs: tuple[str, str] = ("temporal_block.linear_x", "temporal_block.linear_y")
    """Products that compute the values to convolve, and the output gate"""
    convolution: str = "temporal_block.conv_1d"
    gates: tuple[str, str] = (
        "temporal_block.rg_lru.input_gate",
        "temporal_block.rg_lru.recurrent_gate",
    )
    """Products that compute the gates of inputs and of decays, without _weight and _bias"""
    decay: str = "temporal_block.rg_lru.recurrent_param"
    output: str = "temporal_block.linear_out"


@dataclass(frozen=True, slots=True)
class LightningNames:
    """Tensor names of lightning attention; those of products without .weight."""

    inputs: str = "self_attn.qkv_proj"
    """Product that computes query, key and value of the first head, then of the next one, …"""
    gate: str = "self_attn.output_gate"
    norm: str = "self_attn.norm.weight"
    output: str = "self_attn.out_proj"


@dataclass(frozen=True, slots=True)
class MambaNames:
    """Tensor names of Mamba-2; those of products and the convolution without .weight and .bias."""

    inputs: str = "mamba.in_proj"
    """Product that computes the gate, the convolution's input, and the time steps"""
    convolution: str = "mamba.conv1d"
    a_log: str = "mamba.A_log"
    has_rates: bool = False
    """True if `a_log` is stored as -exp(A_log)"""
    step_bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    norm: str = "mamba.norm.weight"
    norm_by_group: bool = False
    """True if `norm` is stored as [groups, outputs of a group]"""
    output: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class SelectiveNames:
    """Tensor names of Mamba; those of products, norms and the convolution without .weight."""

    inputs: str = "mamba.in_proj"
    """Product that computes the convolution's input, and the gate"""
    by_head: bool = False
    """True if `factors`, `steps`, `a_log` and `skip` are stored as [heads, …], without .weight, and
    the outputs of `inputs` alternate between the convolution's input and the gate"""
    convolution: str = "mamba.conv1d"
    factors: str = "mamba.x_proj"
    """Product that computes the time steps, then the factors of inputs and of outputs"""
    steps: str = "mamba.dt_proj"
    norms: tuple[str, str, str] | None = None
    """Norms of the three outputs of `factors`; None: norms without weights, or none"""
    a_log: str = "mamba.A_log"
    has_rates: bool = False
    """True if `a_log` is stored as -exp(A_log)"""
    skip: str = "mamba.D"
    output: str = "mamba.out_proj"
