"""Attention and layers whose code is Llama's, computed by our operators.

A module computes what its class in transformers computes: only code that is equal, statement by
statement, is replaced. Other modules stay as they are.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention import AttentionBackend
from services.engine.model.mixers.attention import (
    AttentionMixer,
    AttentionScratch,
    AttentionWeights,
)
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.rotation import Rotation
from services.engine.model.transformers_code.calls import PagedCalls
from services.engine.model.transformers_code.gated import GatedLayer
from services.engine.model.transformers_code.linear import ProjectedLinear, product_of
from services.engine.model.transformers_code.norms import FusedNorm
from services.engine.model.transformers_code.source import (
    body,
    forward_body,
    function_body,
    loop,
    loops_of,
)
from services.engine.model.transformers_code.workspace import Workspace

__all__ = ["fuse_layers"]

_ATTENTION = """
def forward(self, hidden_states, position_embeddings):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    query_states = {query}.transpose(1, 2)
    key_states = {key}.transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    cos, sin = position_embeddings
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
    attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, eager_attention_forward
    )
    attn_output, attn_weights = attention_interface(
        self, query_states, key_states, value_states, attention_mask
    )
    attn_output = attn_output.reshape(*input_shape, -1).contiguous()
    attn_output = self.o_proj(attn_output)
    return attn_output, attn_weights
"""
_PRODUCT = "self.{}_proj(hidden_states).view(hidden_shape)"
_QUERY, _KEY = _PRODUCT.format("q"), _PRODUCT.format("k")
_LLAMA = body(_ATTENTION.format(query=_QUERY, key=_KEY))
_QWEN3 = body(_ATTENTION.format(query=f"self.q_norm({_QUERY})", key=f"self.k_norm({_KEY})"))
"""Body of attention with a norm of each head"""
_ROTATION = body("""
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
""")
_HALF = body("""
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
""")
_LAYER = body("""
def forward(self, hidden_states):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states, position_embeddings=position_embeddings
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states
""")
_LOOPS = [
    loop(f"""
for {each} in {layers}:
    hidden_states = decoder_layer(hidden_states, position_embeddings=position_embeddings)
""")
    for part in ("", "[: self.config.num_hidden_layers]")
    for each, layers in (
        ("decoder_layer", f"self.layers{part}"),
        ("i, decoder_layer", f"enumerate(self.layers{part})"),
    )
]


class FusedAttention:
    """Attention with one product for queries, keys and values, which are rotated in place."""

    def __init__(
        self, module: Any, mixer: AttentionMixer, calls: PagedCalls, workspace: Workspace
    ) -> None:
        self.mixer = mixer
        self._module = module
        self._calls = calls
        self._workspace = workspace

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Run in place of the forward pass of the module."""
        flat = hidden_states.flatten(0, -2)
        rows = self._workspace.rows("read", flat.shape[1])
        self._workspace.operators.arrange(flat.to(rows.dtype), rows)
        scratch = self._workspace.scratch(self.mixer)
        self.attend(rows, scratch, self._workspace.rotation(*position_embeddings))
        out = rows.new_empty(len(flat), self._module.o_proj.out_features)
        self.mixer.into(scratch, out)
        return out.view(*hidden_states.shape[:-1], -1), None

    def attend(self, rows: Tensor, scratch: AttentionScratch, rotation: Rotation) -> None:
        """Compute the input of the output's product, for rows in the layout of products."""
        self.mixer.project(rows, scratch, (rotation,))
        self._calls.mix(self._module, self.mixer, scratch)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Activations of one fused layer in the present pass."""

    normed: Tensor
    scratch: AttentionScratch
    inner: Tensor
    rotation: Rotation


class FusedLayer:
    """A layer of attention and a gated feed-forward part, whose products add to the residual."""

    def __init__(self, module: Any, attention: FusedAttention, workspace: Workspace) -> None:
        self._first: FusedNorm = module.input_layernorm
        self._second: FusedNorm = module.post_attention_layernorm
        self._attention = attention
        self._feed_forward: GatedLayer = module.mlp
        self._workspace = workspace

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Any, **__: Any
    ) -> Tensor:
        """Run in place of the forward pass of the module."""
        # a copy, because the caller may read its hidden states later
        hidden = hidden_states.to(self._first.weight.dtype, copy=True)
        self.add_to(hidden[0], self.rows(*position_embeddings))
        return hidden

    def rows(self, cosines: Tensor, sines: Tensor) -> LayerRows:
        """Return the activations of the present pass."""
        workspace = self._workspace
        return LayerRows(
            workspace.rows("normed", len(self._first.weight)),
            workspace.scratch(self._attention.mixer),
            workspace.rows("inner", self._feed_forward.width),
            workspace.rotation(cosines, sines),
        )

    def add_to(self, hidden: Tensor, rows: LayerRows) -> None:
        """Add the layer's outputs to the residual [tokens, hidden_size]."""
        operators = self._workspace.operators
        self._first.into(hidden, rows.normed, operators)
        self._attention.attend(rows.normed, rows.scratch, rows.rotation)
        self._attention.mixer.add_to(rows.scratch, hidden)
        self._second.into(hidden, rows.normed, operators)
        self._feed_forward.add_to(rows.normed, hidden, rows.inner)


class _Stack:
    """All layers of a model, which the module of the first one computes in turn."""

    def __init__(
        self, layers: Sequence[FusedLayer], width: int, calls: PagedCalls, workspace: Workspace
    ) -> None:
        self._layers = layers
        self._width = width
        self._calls = calls
        self._workspace = workspace

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Any, **__: Any
    ) -> Tensor:
        """Run in place of the forward pass of the first layer, and compute all layers."""
        hidden = self._workspace.rows("hidden", self._width)
        hidden.copy_(hidden_states[0])
        parts = [(layer, layer.rows(*position_embeddings)) for layer in self._layers]

        def layers() -> None:
            for layer, rows in parts:
                layer.add_to(hidden, rows)

        batch, cache = self._calls.present
        recording = self._workspace.recording
        if recording is None or batch.adapters_host:
            layers()
        else:
            recording.run(batch, cache, layers)
        return hidden[None]


def _unchanged(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Run in place of the forward pass of a layer that `_Stack` has computed."""
    return hidden_states


def fuse_layers(
    model: Any, calls: PagedCalls, backend: AttentionBackend, operators: Operators
) -> Workspace:
    """Replace the forward passes of attention and layers whose code is Llama's.

    model: the base model, with its weights. Returns the activations of the replaced modules, which
    must be told the tokens of each pass.
    """
    workspace = Workspace(operators)
    if not _rotates_halves(model):
        return workspace
    fused: dict[nn.Module, FusedAttention] = {}
    for layer, (module, spec, group) in enumerate(calls.layers()):
        if module not in fused and _is_attention(module, spec):
            weights, epsilon = _weights(module)
            mixer = AttentionMixer(layer, spec, weights, epsilon, 0, operators, backend, group)
            fused[module] = FusedAttention(module, mixer, calls, workspace)
            module.forward = fused[module].forward
    layers: dict[nn.Module, FusedLayer] = {}
    for module in model.modules():
        attention = fused.get(getattr(module, "self_attn", None))  # type: ignore[arg-type]
        if attention is not None and _is_layer(module):
            layers[module] = FusedLayer(module, attention, workspace)
            module.forward = layers[module].forward
    workspace.num_layers = len(layers)
    whole = list(getattr(model, "layers", ()))
    if whole and list(layers) == whole and len(whole) == calls.count and _is_plain_loop(model):
        width = len(whole[0].input_layernorm.weight)
        whole[0].forward = _Stack(list(layers.values()), width, calls, workspace).forward
        for module in whole[1:]:
            module.forward = _unchanged
    return workspace


def _weights(module: Any) -> tuple[AttentionWeights, float]:
    """Return the weights of attention, and the epsilon of its norms."""
    qkv = product_of(module.q_proj, module.k_proj, module.v_proj)
    output = product_of(module.o_proj)
    assert qkv is not None
    assert output is not None
    norms: list[FusedNorm] = [module.q_norm, module.k_norm] if hasattr(module, "q_norm") else []
    weights = AttentionWeights(
        qkv=qkv,
        query_norm=norms[0].weight if norms else None,
        key_norm=norms[1].weight if norms else None,
        head_norms=None,
        value_norm=None,
        sinks=None,
        output=output,
    )
    return weights, norms[0].variance_epsilon if norms else 0.0


def _is_attention(module: Any, spec: AttentionSpec) -> bool:
    code = forward_body(module)
    if code not in (_LLAMA, _QWEN3) or spec.has_sinks or spec.head_dim != module.head_dim:
        return False
    of_module = sys.modules[type(module).__module__]
    helpers = (("apply_rotary_pos_emb", _ROTATION), ("rotate_half", _HALF))
    if any(function_body(getattr(of_module, name, None)) != known for name, known in helpers):
        return False
    names = list(inspect.signature(type(module).forward).parameters)
    projections = [getattr(module, f"{name}_proj") for name in "qkv"]
    if names[1:3] != ["hidden_states", "position_embeddings"] or not _share(*projections):
        return False
    if not isinstance(module.o_proj, ProjectedLinear):
        return False
    norms = (module.q_norm, module.k_norm) if code == _QWEN3 else ()
    return all(
        isinstance(norm, FusedNorm) and norm.weight.shape == (spec.head_dim,) for norm in norms
    )


def _share(*projections: Any) -> bool:
    """Return whether these linear layers share one product, which serves no others."""
    if not all(isinstance(each, ProjectedLinear) for each in projections):
        return False
    return product_of(*projections) is not None


def _is_layer(module: Any) -> bool:
    norms = [getattr(module, f"{name}_layernorm", None) for name in ("input", "post_attention")]
    if not all(isinstance(norm, FusedNorm) for norm in norms):
        return False
    return isinstance(module.mlp, GatedLayer) and forward_body(module) == _LAYER


def _is_plain_loop(model: Any) -> bool:
    """Return whether a model calls its layers in turn, and nothing between them."""
    loops = loops_of(type(model).forward)
    return len(loops) == 1 and loops[0] in _LOOPS


@torch.no_grad()
def _rotates_halves(model: Any) -> bool:
    """Return whether a model's only rotation pairs dimensions i and i + head_dim / 2."""
    rotary = getattr(model, "rotary_emb", None)
    if rotary is None:
        return False
    device = next(model.parameters()).device
    positions = torch.tensor([[1, 5]], device=device)
    try:
        tables = rotary(torch.empty(1, 1, device=device), positions)
    except (AttributeError, KeyError, TypeError):
        return False  # it has several, one for each type of layers
    if not isinstance(tables, tuple) or any(each.ndim != 3 for each in tables):
        return False
    return all(torch.equal(*each.chunk(2, dim=2)) for each in tables)
