"""Linear layers of a model, replaced by our products."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.engine.model.operators.interface import Operators, Projection

__all__ = [
    "Division",
    "JointProduct",
    "ProjectedLinear",
    "arrange_beside",
    "arranged",
    "joined",
    "product_of",
    "replace_linears",
]

_JOINED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))
"""Names of linear layers that read the same rows, in the order in which modules call them"""
_ARRANGED = "tokenwire_arranged"


def arrange_beside(rows: Tensor, copy: Tensor) -> Tensor:
    """Return `rows`, to which `copy`, in the layout of products, is attached for `arranged`."""
    setattr(rows, _ARRANGED, copy)
    return rows


def arranged(rows: Tensor, operators: Operators) -> Tensor:
    """Return rows [..., inputs] in the layout of products, [n, inputs]."""
    copy: Tensor | None = getattr(rows, _ARRANGED, None)
    if copy is None:
        flat = rows.reshape(-1, rows.shape[-1])
        copy = operators.temporary(*flat.shape)
        operators.arrange(flat.to(copy.dtype), copy)
    return copy


class Division(Enum):
    """Part of a linear layer that each rank has."""

    NONE = auto()
    OUTPUTS = auto()
    INPUTS = auto()
    """The ranks' products are summed"""
    GATHERED = auto()
    """Outputs are divided, and rank 0 gathers them"""


class JointProduct:
    """One product for linear layers of a module that read the same rows."""

    def __init__(
        self,
        projection: Projection,
        widths: Sequence[int],
        operators: Operators,
        dtype: torch.dtype | None = None,
    ) -> None:
        """widths: number of outputs of each layer, which `projection` has one after the other.

        dtype: that of the outputs; None = the model's.
        """
        self.projection = projection
        self.widths = widths
        self._operators = operators
        self._dtype = dtype
        self._rows: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}
        """Outputs for `_rows` that their layers have not asked for"""

    def part(self, number: int, rows: Tensor) -> Tensor:
        """Return a layer's outputs [..., width] for [..., inputs]."""
        if len(self.widths) == 1:
            return self._multiply(rows)
        if rows is not self._rows or number not in self._waiting:
            parts = self._multiply(rows).split_with_sizes(list(self.widths), dim=-1)
            self._rows, self._waiting = rows, dict(enumerate(parts))
        part = self._waiting.pop(number)
        if not self._waiting:
            self._rows = None
        return part

    def _multiply(self, rows: Tensor) -> Tensor:
        copy = arranged(rows, self._operators)
        out = copy.new_empty(len(copy), sum(self.widths), dtype=self._dtype)
        self.projection.into(copy, out)
        return out.view(*rows.shape[:-1], -1)


class ProjectedLinear(nn.Module):
    """A linear layer whose product is read after the modules are built."""

    def __init__(self, inputs: int, outputs: int, *, has_bias: bool, is_transposed: bool) -> None:
        super().__init__()
        self.inputs = self.in_features = inputs
        self.outputs = self.out_features = outputs
        self.division = Division.NONE
        self.has_bias = has_bias
        self.is_transposed = is_transposed
        """True if the stored weight is [inputs, outputs]"""
        self.trial_rows: set[int] = set()
        """Numbers of rows in calls of trial passes"""
        self._product: JointProduct | None = None
        self._number = 0

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Shape of the weight in files."""
        shape = (self.outputs, self.inputs)
        return shape[::-1] if self.is_transposed else shape

    def divide(self, division: Division, count: int) -> None:
        """Keep one rank's part of `count`; `inputs` and `outputs` stay those of all ranks."""
        self.division = division
        if division is Division.OUTPUTS:
            self.out_features = self.outputs // count
        elif division is Division.INPUTS:
            self.in_features = self.inputs // count

    def hold(self, product: JointProduct, number: int) -> None:
        """Return part `number` of a product from now on."""
        self._product = product
        self._number = number

    def forward(self, rows: Tensor) -> Tensor:
        """Return [..., outputs] for [..., inputs]."""
        if self._product is None:  # a trial pass
            if rows.shape[-1] != self.in_features:
                raise ValueError(f"{rows.shape[-1]} inputs for a layer of {self.in_features}")
            self.trial_rows.add(rows.shape[:-1].numel())
            return rows.new_empty((*rows.shape[:-1], self.out_features))
        return self._product.part(self._number, rows)

    @property
    def product(self) -> JointProduct | None:
        """The product of which the layer returns a part."""
        return self._product


def replace_linears(model: nn.Module) -> dict[str, ProjectedLinear]:
    """Replace the linear layers of a model; return the new ones by name.

    Layers stay if other modules multiply by their weights themselves, as with some routers.
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


def product_of(*linears: ProjectedLinear) -> Projection | None:
    """Return the product of linear layers, one after the other; None if there is none."""
    product = linears[0].product
    if product is None or product.widths != [each.out_features for each in linears]:
        return None
    return product.projection if all(each.product is product for each in linears) else None


def _source(kind: type) -> str:
    """Return the source code of a class, empty if only its bytecode is installed."""
    try:
        return inspect.getsource(kind)
    except OSError:
        return ""


def joined(linears: Mapping[str, ProjectedLinear]) -> Iterable[Sequence[str]]:
    """Return the names of all linear layers, grouped by the product that serves them."""
    done: set[str] = set()
    for name in linears:
        parent, _, last = name.rpartition(".")
        siblings = next((each for each in _JOINED if last in each), (last,))
        names = [f"{parent}.{each}" if parent else each for each in siblings]
        found = [linears[each] for each in names if each in linears]
        kinds = {(each.inputs, each.has_bias, each.is_transposed, each.division) for each in found}
        if len(found) < len(names) or len(kinds) > 1:
            names = [name]
        if name not in done:
            done.update(names)
            yield names
