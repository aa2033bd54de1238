"""Optimizers: Muon for the matrices of the layers, AdamW for all other parameters.

Muon and the coefficients of its quintic Newton-Schulz iteration are from
https://kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices to `matrices` [count, rows, columns]."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result.float()


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates, for 2-D parameters."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters; those of one shape are orthogonalized together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                directions = orthogonalize(
                    torch.stack([self._direction(p, group["momentum"]) for p in parameters])
                )
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                        direction, alpha=-scale
                    )

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        average: Tensor = state["momentum"]
        average.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def make_optimizers(
    model: nn.Module, matrix_lr: float, other_lr: float
) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices of the layers and AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=matrix_lr), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
