"""Division of a model's linear layers among ranks, by its plan in transformers (tp_plan)."""

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.transformers_code.experts import experts_of
from services.engine.model.transformers_code.linear import Division, ProjectedLinear
from services.engine.model.transformers_code.refusal import UnsupportedError

__all__ = ["divide", "require_divided_heads"]

_DIVISIONS = {"colwise": Division.OUTPUTS, "rowwise": Division.INPUTS}
_WHOLE = frozenset(
    {
        "colwise_gather_output",
        "embedding_rowwise",
        "replicate",
        "replicated_with_grad_allreduce",
        "rowwise_split_input",
    }
)
"""Styles whose modules each rank may have whole: their inputs and outputs are whole"""


def divide(model: PreTrainedModel, linears: Mapping[str, ProjectedLinear], count: int) -> None:
    """Give each of `count` ranks a part of the linear layers that the model's plan divides.

    Raises UnsupportedError for a model that has no plan, or whose plan can't be followed.
    """
    plan: Mapping[str, str] = model._tp_plan or {}
    if experts_of(model):
        raise UnsupportedError(f"its experts can't be divided among {count} ranks")
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    divided = 0
    for pattern, style in plan.items():
        for name in _matching(model, linears, pattern):
            linear = linears.get(name)
            if linear is not None and linear is head and style == "colwise_gather_output":
                linear.divide(Division.GATHERED, count)
            elif linear is not None and style in _DIVISIONS:
                _divide(name, linear, _DIVISIONS[style], count)
                divided += 1
            elif style not in _WHOLE:
                raise UnsupportedError(f"its tp_plan has {style} for {name}, which is not followed")
    if not divided:
        raise UnsupportedError(f"it has no tp_plan that divides its layers among {count} ranks")


def require_divided_heads(
    whole: Sequence[AttentionSpec], part: Sequence[AttentionSpec], count: int
) -> None:
    """Raise UnsupportedError unless a rank has all heads, or one `count`-th, of each layer.

    whole, part: the layers of the model and of a rank.
    """
    for all_heads, mine in zip(whole, part, strict=True):
        counts = [(each.num_heads, each.num_kv_heads, each.head_dim) for each in (all_heads, mine)]
        (heads, key_heads, width), own = counts
        if own not in ((heads, key_heads, width), (heads / count, key_heads / count, width)):
            raise UnsupportedError(
                f"its {heads} heads, {key_heads} of keys, can't be divided among {count} ranks"
            )


def _divide(name: str, linear: ProjectedLinear, division: Division, count: int) -> None:
    width = linear.in_features if division is Division.INPUTS else linear.out_features
    if width % count:
        raise UnsupportedError(f"{name} is {width} wide, which {count} ranks can't divide")
    linear.divide(division, count)


def _matching(model: nn.Module, linears: Iterable[str], pattern: str) -> list[str]:
    """Return the modules or parameters that a key of the plan names, in which "*" is a number.

    linears: names of linear layers, of which gated layers have taken some out of the model.
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    modules = dict.fromkeys((*linears, *(name for name, _ in model.named_modules())))
    found = [name for name in modules if expression.fullmatch(name)]
    return found or [n for n, _ in model.named_parameters() if expression.fullmatch(n)]
