"""The adapters of a decoder, and which rows of a pass have one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device
from services.engine.model.adapters.peft_files import LowRankPair, PeftAdapter
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.operators.interface import Delta, Operators
from services.engine.model.operators.low_rank import LowRank, RowGroup, RowGroups

__all__ = ["Adapters", "Site", "SiteModule"]


@dataclass(frozen=True, slots=True)
class SiteModule:
    """One linear layer of the checkpoint within a product."""

    name: str
    """Without the prefix of the checkpoint's names"""
    outputs: int


@dataclass(frozen=True, slots=True)
class Site:
    """A product that adapters may change, and what the weight reader has folded into its weight."""

    modules: tuple[SiteModule, ...]
    """In the order of the product's outputs"""
    inputs: int
    order: Tensor | None = None
    """int64 [outputs], the stored output at each place of the product; None = as stored"""
    norm_bias: Tensor | None = None
    """[inputs], a bias of the inputs that the product's own bias contains; None = none"""
    fold: Callable[[Tensor], Tensor] | None = None
    """Applied to the weight [outputs, inputs] when it was read; None = nothing was"""


class Adapters:
    """Adapters by number, from 1. Number 0 stands for the model alone."""

    def __init__(
        self,
        operators: Operators,
        dtype: torch.dtype,
        device: torch.device,
        roots: Iterable[str],
    ) -> None:
        """roots: prefixes that the names of the decoder's layers may have."""
        self._roots = sorted(filter(None, roots), key=len, reverse=True)
        self._operators = operators
        self._dtype = dtype
        self._device = device
        self._deltas: list[_SiteDelta] = []
        self._kept: RowGroups | None = None
        self.rows: RowGroups | None = None
        """Rows of the present product by adapter; None = no row has one"""

    def delta(self, site: Site) -> Delta:
        """Make what adapters add to a product."""
        delta = _SiteDelta(self, site, self._operators)
        self._deltas.append(delta)
        return delta

    def load(self, number: int, adapter: PeftAdapter) -> int:
        """Keep an adapter's weights; return their bytes.

        Raises CheckpointError, and keeps nothing, if the adapter does not fit the model.
        """
        pairs = {_without_root(name, self._roots): pair for name, pair in adapter.pairs.items()}
        known = {module.name for delta in self._deltas for module in delta.site.modules}
        if unknown := sorted(pairs.keys() - known):
            raise CheckpointError(
                f"{unknown[0]} can't have an adapter. Supported are those of attention's "
                "projections and of dense feed-forward layers, not of embeddings, the output "
                "projection and experts."
            )
        made = [(delta, self._parts(delta.site, pairs)) for delta in self._deltas]
        for delta, parts in made:
            if parts:
                delta.add(number, parts)
        return sum(part.num_bytes for _, parts in made for part in parts)

    def layers(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, inputs and outputs of each linear layer that may have an adapter."""
        for delta in self._deltas:
            for module in delta.site.modules:
                yield module.name, delta.site.inputs, module.outputs

    def unload(self, number: int) -> None:
        """Drop an adapter's weights."""
        for delta in self._deltas:
            delta.remove(number)

    def begin(self, batch: StepBatch) -> None:
        """Take the adapters of the pass that follows."""
        numbers = batch.adapters_host
        self.rows = self._groups(numbers, batch.query_lengths_host)
        outputs = batch.output_rows
        self._kept = self.rows if outputs is None else self._groups(numbers, outputs.lengths_host)

    def narrow(self) -> None:
        """Go on with the pass's output rows."""
        self.rows = self._kept

    def end(self) -> None:
        """Compute without adapters again."""
        self.rows = self._kept = None

    def _groups(self, numbers: Sequence[int], lengths: Sequence[int]) -> RowGroups:
        used = sorted(set(numbers) - {0})
        owners = torch.tensor(numbers, dtype=torch.int32)
        owners = owners.repeat_interleave(torch.tensor(lengths))
        if len(used) == 1 and 0 not in numbers:
            return RowGroups((RowGroup(used[0], None),), owners)
        places = ((number, torch.where(owners == number)[0]) for number in used)
        groups = (RowGroup(number, to_device(place, self._device)) for number, place in places)
        return RowGroups(tuple(groups), owners)

    def _parts(self, site: Site, pairs: dict[str, LowRankPair]) -> list[LowRank]:
        parts, first = [], 0
        for module in site.modules:
            if (pair := pairs.get(module.name)) is not None:
                parts.append(self._part(site, module, pair, first))
            first += module.outputs
        return parts

    def _part(self, site: Site, module: SiteModule, pair: LowRankPair, first: int) -> LowRank:
        inputs, outputs = pair.down.shape[1], pair.up.shape[0]
        if (inputs, outputs) != (site.inputs, module.outputs):
            raise CheckpointError(
                f"the adapter of {module.name} has {inputs} inputs and {outputs} outputs, the "
                f"model {site.inputs} and {module.outputs}."
            )
        down, up = pair.down.float(), pair.up.float() * pair.scale
        if site.order is not None:
            up = up[site.order[first : first + outputs] - first]
        if site.fold is not None:
            up = site.fold(up)
        bias = None if site.norm_bias is None else self._own(down @ site.norm_bias.float())
        return LowRank(self._own(down), bias, self._own(up.float().T), first)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype).contiguous()


class _SiteDelta(Delta):
    """Additions of the adapters to one product."""

    def __init__(self, adapters: Adapters, site: Site, operators: Operators) -> None:
        self._adapters = adapters
        self._operators = operators
        self.site = site
        self._parts: dict[int, Sequence[LowRank]] = {}
        """By number of the adapter; those that leave this product alone are missing"""
        self._product = operators.low_rank({})

    def add(self, number: int, parts: Sequence[LowRank]) -> None:
        """Take an adapter's parts."""
        self._parts[number] = parts
        self._product = self._operators.low_rank(dict(self._parts))

    def remove(self, number: int) -> None:
        """Drop an adapter's parts, if it has any."""
        if self._parts.pop(number, None) is not None:
            self._product = self._operators.low_rank(dict(self._parts))

    @property
    def is_active(self) -> bool:
        return self._adapters.rows is not None

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        if self._parts and self._adapters.rows is not None:
            self._product.add_to(rows, out, self._adapters.rows)


def _without_root(name: str, roots: Sequence[str]) -> str:
    """Return a layer's name without the prefix of its checkpoint."""
    root = next((root for root in roots if name.startswith(root)), "")
    return name.removeprefix(root)
