"""Output projection that computes the logits of some clusters of ids alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.operators.interface import Operators, Projection

__all__ = ["ClusteredOutput"]


@dataclass
class ClusteredOutput(Projection):
    """Logits of the ids in the clusters that fit a row best; those of other ids are -infinity."""

    centroids: Projection
    """hidden_size → clusters"""
    table: Tensor
    """[clusters, ids of a cluster, hidden_size]"""
    ids: Tensor
    """int64 [clusters, ids of a cluster]"""
    chosen: int
    """Number of the clusters whose logits are computed"""
    operators: Operators

    def __post_init__(self) -> None:
        self.has_argmax = self.table.device.type == "cpu"
        share = self.chosen / len(self.table)
        self.weight_bytes = self.centroids.weight_bytes + int(self.table.nbytes * share)

    def into(self, rows: Tensor, out: Tensor) -> None:
        ids, logits = self._logits(rows)
        out.fill_(-torch.inf).scatter_(1, ids, logits.to(out.dtype))

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    def argmax(self, rows: Tensor, out: Tensor) -> None:
        ids, logits = self._logits(rows)
        most, place = logits.max(dim=1)
        found = ids.gather(1, place[:, None])[:, 0]
        out.copy_(found.masked_fill_(most.isnan(), -1))

    def _logits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and float32 logits, [n, ids of the chosen clusters] each."""
        scores = torch.empty(len(rows), len(self.table), device=rows.device)
        self.centroids.into(rows, scores)
        clusters = scores.topk(self.chosen, dim=1).indices
        table, plain = self.table[clusters].flatten(1, 2), self.operators.plain(rows)
        logits = (table @ plain[:, :, None].to(table.dtype))[:, :, 0]
        return self.ids[clusters].flatten(1), logits.float()
