"""Linear layers of a model, replaced by our products."""

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.engine.model.operators.interface import Operators, Projection

__all__ = ["ProjectedLinear", "replace_linears"]


class ProjectedLinear(nn.Module):
    """A linear layer whose product is a `Projection`, read after the modules are built."""

    def __init__(self, inputs: int, outputs: int, *, has_bias: bool, is_transposed: bool) -> None:
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.has_bias = has_bias
        self.is_transposed = is_transposed
        """The stored weight is [inputs, outputs]"""
        self._projection: Projection | None = None
        self._operators: Operators | None = None

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Shape of the weight in files."""
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.is_transposed else shape

    def hold(self, projection: Projection, operators: Operators) -> None:
        """Multiply with `projection` from now on."""
        self._projection = projection
        self._operators = operators

    def forward(self, rows: Tensor) -> Tensor:
        """Return [..., outputs] for [..., inputs]."""
        shape = (*rows.shape[:-1], self.out_features)
        if self._projection is None or self._operators is None:
            return rows.new_empty(shape)  # a trial pass
        flat = rows.reshape(-1, self.in_features)
        arranged = self._operators.temporary(*flat.shape)
        out = rows.new_empty((len(flat), self.out_features), dtype=arranged.dtype)
        self._operators.arrange(flat.to(arranged.dtype), arranged)
        self._projection.into(arranged, out)
        return out.view(shape)


def replace_linears(model: nn.Module) -> dict[str, ProjectedLinear]:
    """Replace the linear layers of a model; return the new ones by name."""
    replaced: dict[str, ProjectedLinear] = {}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            outputs, inputs = module.weight.shape
        elif type(module) is Conv1D:
            inputs, outputs = module.weight.shape
        else:
            continue
        linear = ProjectedLinear(
            inputs,
            outputs,
            has_bias=module.bias is not None,
            is_transposed=isinstance(module, Conv1D),
        )
        model.set_submodule(name, linear)
        replaced[name] = linear
    return replaced
