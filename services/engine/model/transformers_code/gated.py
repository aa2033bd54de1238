"""Gated feed-forward layers of a model, computed as two of our products."""

from torch import Tensor, nn
from transformers.activations import ACT2FN

from services.engine.model.architecture.activation import Activation, Nonlinearity
from services.engine.model.operators.interface import Gate, Operators, Projection
from services.engine.model.transformers_code.linear import ProjectedLinear, arranged
from services.engine.model.transformers_code.source import body, forward_body

__all__ = ["PARTS", "GatedLayer", "replace_gated"]

PARTS = ("gate_proj", "up_proj", "down_proj")
"""Names of a gated layer's linear layers"""
_FORWARDS = [
    body(f"""
def forward(self, {rows}):
    down_proj = self.down_proj(self.act_fn(self.gate_proj({rows})) * self.up_proj({rows}))
    return down_proj
""")
    for rows in ("x", "hidden_state", "hidden_states")
]
"""Forward pass of Llama's layer, which most models repeat"""
_NONLINEARITIES = {
    type(ACT2FN[kind.value]): kind
    for kind in (Nonlinearity.SILU, Nonlinearity.GELU, Nonlinearity.GELU_TANH)
}


class GatedLayer(nn.Module):
    """A gated linear unit (https://arxiv.org/abs/2002.05202) and the product behind it."""

    def __init__(
        self,
        gate: ProjectedLinear,
        up: ProjectedLinear,
        down: ProjectedLinear,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.width = 0
        """Number of the gate's outputs on this rank"""
        self._outputs = down.out_features
        self._linears = (gate, up, down)
        self._products: tuple[Gate, Projection] | None = None
        self._operators: Operators | None = None

    def hold(self, gate: Gate, down: Projection, width: int, operators: Operators) -> None:
        """Compute with these products from now on. width: number of the gate's outputs."""
        self.width = width
        self._products = (gate, down)
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., outputs] for [..., inputs]."""
        if self._products is None or self._operators is None:  # a trial pass
            first, second, last = self._linears
            made: Tensor = last(first(x) * second(x))
            return made
        rows = arranged(x, self._operators)
        out = rows.new_empty(len(rows), self._outputs)
        gate, down = self._products
        inner = self._operators.temporary(len(rows), self.width)
        gate.into(rows, inner)
        down.into(inner, out)
        return out.view(*x.shape[:-1], self._outputs)

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        """Add the result for `rows` [n, inputs], in the layout of products, to `out` [n, outputs].

        inner: [n, width], which is overwritten.
        """
        assert self._products is not None
        gate, down = self._products
        gate.into(rows, inner)
        down.add_to(inner, out)


def replace_gated(model: nn.Module) -> dict[str, GatedLayer]:
    """Replace feed-forward layers whose code is Llama's; return the new ones by name.

    Their linear layers must be `ProjectedLinear`s already.
    """
    replaced: dict[str, GatedLayer] = {}
    for name, module in list(model.named_modules()):
        gate, up, down = (getattr(module, part, None) for part in PARTS)
        kind = _NONLINEARITIES.get(type(getattr(module, "act_fn", None)))
        if (
            kind is None
            or not isinstance(gate, ProjectedLinear)
            or not isinstance(up, ProjectedLinear)
            or not isinstance(down, ProjectedLinear)
            or forward_body(module) not in _FORWARDS
        ):
            continue
        layer = GatedLayer(gate, up, down, Activation(kind))
        model.set_submodule(name, layer)
        replaced[name] = layer
    return replaced
