"""Linear layers of a model, replaced by our products."""

import inspect
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.engine.model.operators.interface import Operators, Projection

__all__ = ["JointProduct", "ProjectedLinear", "joined", "replace_linears"]

_JOINED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))
"""Names of linear layers that read the same rows, in the order in which modules call them"""


class JointProduct:
    """One product for linear layers of a module that read the same rows."""

    def __init__(self, projection: Projection, widths: Sequence[int], operators: Operators) -> None:
        """widths: outputs of each layer, which `projection` has one after the other."""
        self._projection = projection
        self._widths = widths
        self._operators = operators
        self._rows: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}
        """Outputs for `_rows` that their layers have not asked for"""

    def part(self, number: int, rows: Tensor) -> Tensor:
        """Return a layer's outputs [..., width] for [..., inputs]."""
        if len(self._widths) == 1:
            return self._multiply(rows)
        if rows is not self._rows or number not in self._waiting:
            parts = self._multiply(rows).split_with_sizes(list(self._widths), dim=-1)
            self._rows, self._waiting = rows, dict(enumerate(parts))
        part = self._waiting.pop(number)
        if not self._waiting:
            self._rows = None
        return part

    def _multiply(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        arranged = self._operators.temporary(*flat.shape)
        out = arranged.new_empty(len(flat), sum(self._widths))
        self._operators.arrange(flat.to(arranged.dtype), arranged)
        self._projection.into(arranged, out)
        return out.view(*rows.shape[:-1], -1)


class ProjectedLinear(nn.Module):
    """A linear layer whose product is read after the modules are built."""

    def __init__(self, inputs: int, outputs: int, *, has_bias: bool, is_transposed: bool) -> None:
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.has_bias = has_bias
        self.is_transposed = is_transposed
        """The stored weight is [inputs, outputs]"""
        self._product: JointProduct | None = None
        self._number = 0

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Shape of the weight in files."""
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.is_transposed else shape

    def hold(self, product: JointProduct, number: int) -> None:
        """Return part `number` of a product from now on."""
        self._product = product
        self._number = number

    def forward(self, rows: Tensor) -> Tensor:
        """Return [..., outputs] for [..., inputs]."""
        if self._product is None:  # a trial pass
            return rows.new_empty((*rows.shape[:-1], self.out_features))
        return self._product.part(self._number, rows)


def replace_linears(model: nn.Module) -> dict[str, ProjectedLinear]:
    """Replace the linear layers of a model; return the new ones by name.

    Those stay whose weights other modules multiply themselves, as some routers' do.
    """
    replaced: dict[str, ProjectedLinear] = {}
    sources: dict[type[nn.Module], str] = {}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            outputs, inputs = module.weight.shape
        elif type(module) is Conv1D:
            inputs, outputs = module.weight.shape
        else:
            continue
        parent, _, last = name.rpartition(".")
        kind = type(model.get_submodule(parent))
        if kind not in sources:
            sources[kind] = _source(kind)
        if f"self.{last}.weight" in sources[kind]:
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


def _source(kind: type) -> str:
    """Return the code of a class, empty if only its bytecode is installed."""
    try:
        return inspect.getsource(kind)
    except OSError:
        return ""


def joined(linears: Mapping[str, ProjectedLinear]) -> Iterable[Sequence[str]]:
    """Return the names of all linear layers, those together that one product serves."""
    done: set[str] = set()
    for name in linears:
        parent, _, last = name.rpartition(".")
        siblings = next((each for each in _JOINED if last in each), (last,))
        names = [f"{parent}.{each}" if parent else each for each in siblings]
        found = [linears[each] for each in names if each in linears]
        kinds = {(each.in_features, each.has_bias, each.is_transposed) for each in found}
        if len(found) < len(names) or len(kinds) > 1:
            names = [name]
        if name not in done:
            done.update(names)
            yield names
