"""Logits: the output projection in bfloat16 beside float32 out of the product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu.context import Context, Row, Rows
from benchmarks.gpu.timing import case

__all__ = ["measure_logits"]


def measure_logits(context: Context) -> Rows:
    """Yield the times of both ways, and the rows whose best token the rounding changes."""
    tokens, width = context.size((128256, 4096), (512, 64))
    device = context.device
    weight = torch.randn(tokens, width, device=device).bfloat16()
    read = weight.nbytes
    for rows in context.size((1, 64, 256, 1024), (2,)):
        hidden = torch.randn(rows, width, device=device).bfloat16()
        out = torch.empty(rows, tokens, device=device)

        def rounded() -> object:
            return out.copy_(linear(hidden, weight))  # noqa: B023

        def exact() -> Tensor:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)  # noqa: B023

        def best() -> object:
            return out.argmax(-1)  # noqa: B023

        for how, call in (
            ("bfloat16, then a copy to float32", rounded),
            ("float32 out of the product", exact),
            ("argmax of float32 rows", best),
        ):
            names: Row = {"rows": rows, "how": how}
            yield case(context, names, lambda: [call] * 2, bytes_moved=read)  # noqa: B023
        scores = hidden.float() @ weight.float().T if rows <= 64 else out.copy_(exact())
        changed = (scores.argmax(-1) != scores.bfloat16().float().argmax(-1)).sum().item()
        top = scores.bfloat16().float().topk(2).values
        ties = (top[:, 0] == top[:, 1]).sum().item()
        yield {"rows": rows, "best token changed": int(changed), "ties at the top": int(ties)}
