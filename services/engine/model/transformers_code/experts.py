"""Mixtures of experts of a model, computed with our products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from services.engine.model.operators.interface import Operators, Projection

__all__ = ["EXPERTS", "ProjectedExperts", "experts_of", "hold"]

EXPERTS = "tokenwire"
"""Name of our experts in transformers"""
_ATTRIBUTE = "tokenwire_experts"


class ProjectedExperts:
    """Our products for a module of experts, which keeps its own activation."""

    def __init__(
        self,
        first: Sequence[Projection],
        down: Sequence[Projection],
        width: int,
        operators: Operators,
    ) -> None:
        """first: each expert's gate and up side by side, or only up; `width` outputs."""
        self._first = first
        self._down = down
        self._width = width
        self._operators = operators
        self.weight_bytes = sum(each.weight_bytes for each in (*first, *down))

    def add_to(self, module: Any, rows: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        """Return each row's sum of its experts' outputs, times their factors.

        rows: [n, inputs]; chosen: int64 [n, k]; factors: [n, k].
        """
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        # In the order of the experts' numbers, a row's sum is independent of the batch.
        for number in sorted(set(chosen.flatten().tolist())):
            if number >= len(self._first):
                continue  # some routers mean "no expert" by a number after the last
            index, choice = torch.where(chosen == number)
            product = self._product(self._first[number], rows[index], self._width)
            inner = module._apply_gate(product) if module.has_gate else module.act_fn(product)
            output = self._product(self._down[number], inner, rows.shape[1])
            if module.has_post_expert_norm:
                output = module.post_expert_norm(output)
            total[index] += output * factors[index, choice, None]
        return total.to(rows.dtype)

    def _product(self, projection: Projection, rows: Tensor, width: int) -> Tensor:
        arranged = self._operators.temporary(*rows.shape)
        self._operators.arrange(rows.to(arranged.dtype).contiguous(), arranged)
        out = arranged.new_empty((len(rows), width))
        projection.into(arranged, out)
        return out


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's modules of experts that use transformers' interface, by name."""
    modules = model.named_modules()
    return {name: module for name, module in modules if hasattr(module, "_is_expert_parallel")}


def hold(module: nn.Module, experts: ProjectedExperts) -> None:
    """Have a module of experts multiply with our products, in place of its parameters."""
    setattr(module, _ATTRIBUTE, experts)


def _mix(module: Any, rows: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    experts: ProjectedExperts | None = getattr(module, _ATTRIBUTE, None)
    if experts is None:
        return torch.empty_like(rows)  # a trial pass
    return experts.add_to(module, rows, chosen, factors)


ExpertsInterface.register(EXPERTS, _mix)
