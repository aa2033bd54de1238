"""Gated feed-forward layers of a model, computed as two of our products."""

import ast
import inspect
import textwrap

from torch import Tensor, nn
from transformers.activations import ACT2FN

from services.engine.model.architecture.activation import Activation, Nonlinearity
from services.engine.model.operators.interface import Gate, Operators, Projection
from services.engine.model.transformers_code.linear import ProjectedLinear

__all__ = ["PARTS", "GatedLayer", "replace_gated"]

PARTS = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of such a layer"""
_FORWARD = """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
"""
"""Forward pass of Llama's layer, which most models repeat"""
_NONLINEARITIES = {
    type(ACT2FN[kind.value]): kind
    for kind in (Nonlinearity.SILU, Nonlinearity.GELU, Nonlinearity.GELU_TANH)
}


class GatedLayer(nn.Module):
    """A gated linear unit (https://arxiv.org/abs/2002.05202) and the product behind it."""

    def __init__(self, width: int, outputs: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self._width = width
        self._outputs = outputs
        self._products: tuple[Gate, Projection] | None = None
        self._operators: Operators | None = None

    def hold(self, gate: Gate, down: Projection, operators: Operators) -> None:
        """Compute with these products from now on."""
        self._products = (gate, down)
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., outputs] for [..., inputs]."""
        shape = (*x.shape[:-1], self._outputs)
        if self._products is None or self._operators is None:
            return x.new_empty(shape)  # a trial pass
        (gate, down), operators = self._products, self._operators
        flat = x.reshape(-1, x.shape[-1])
        arranged = operators.temporary(*flat.shape)
        operators.arrange(flat.to(arranged.dtype), arranged)
        inner = operators.temporary(len(flat), self._width)
        gate.into(arranged, inner)
        out = arranged.new_empty(len(flat), self._outputs)
        down.into(inner, out)
        return out.view(shape)


def replace_gated(model: nn.Module) -> dict[str, GatedLayer]:
    """Replace feed-forward layers whose code is Llama's; return the new ones by name.

    Their linear layers are `ProjectedLinear`s by now.
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
            or _body(inspect.getsource(type(module).forward)) != _body(_FORWARD)
        ):
            continue
        layer = GatedLayer(gate.out_features, down.out_features, Activation(kind))
        model.set_submodule(name, layer)
        replaced[name] = layer
    return replaced


def _body(source: str) -> str:
    """Return the statements of a function, whose argument is called x."""
    [function] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    if len(function.args.args) != 2:
        return ""
    argument = function.args.args[1].arg
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == argument:
            node.id = "x"
    return "\n".join(map(ast.dump, function.body))
