"""The adapters of a decoder, and the rows of a pass that use them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device
from services.engine.model.adapters.peft_files import LowRankPair, PeftAdapter
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.operators.deltas import Delta, ExpertDeltas, SequenceDelta, TableDelta
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.low_rank import (
    GRAPH_RANK,
    LowRank,
    RowGroup,
    RowGroups,
    SortedRows,
)

__all__ = ["AdapterChange", "Adapters", "ConvertedAdapter", "Site", "SiteModule", "StackedPart"]


@dataclass(frozen=True, slots=True)
class SiteModule:
    """One linear layer of the checkpoint within a product."""

    name: str
    """Name of the layer, without the prefix of the checkpoint's names"""
    outputs: int
    alias: str = ""
    """Other name of the layer in adapters; empty if it has none"""
    factors: Tensor | None = None
    """[outputs], factors by which the weight was multiplied; None = no factors"""


@dataclass(frozen=True, slots=True)
class StackedPart:
    """One expert's part of a parameter that stacks all experts, as adapters store it."""

    name: str
    """Name of the parameter, without the prefix of the checkpoint's names"""
    outputs: int
    expert: int
    count: int
    """Number of experts in the parameter"""

    def of(self, pair: LowRankPair) -> LowRankPair:
        """Return the expert's part of an adapter of the parameter.

        Rows of `down` are ordered by expert, then rank, columns of `up` by rank, then expert, as in
        PEFT's ParamWrapper. Raises CheckpointError if they do not divide into the experts.
        """
        rank, rest = divmod(len(pair.down), self.count)
        if rest:
            raise CheckpointError(
                f"the adapter of {self.name} has {len(pair.down)} rows in lora_A, which is not a "
                f"multiple of the {self.count} experts."
            )
        down = pair.down[self.expert * rank : (self.expert + 1) * rank]
        return LowRankPair(down, pair.up[:, self.expert :: self.count], pair.scale)


@dataclass(frozen=True, slots=True)
class Site:
    """A product that adapters may change, with the changes that loading made to its weight."""

    modules: tuple[SiteModule, ...]
    """Linear layers in the order of the stored outputs; empty: the checkpoint has only a stack"""
    inputs: int
    order: Tensor | None = None
    """int64 [outputs], the stored output at each place of the product; None = all as stored. The
    outputs of one module are neighbours, and a rank has a part of each module"""
    columns: slice | None = None
    """Inputs that this rank has; None = all"""
    norm_bias: Tensor | None = None
    """[inputs], a bias of the inputs that the product's own bias contains; None = none"""
    fold: Callable[[Tensor], Tensor] | None = None
    """Change that loading made to the weight [outputs, inputs]; None = no change"""
    stacked: StackedPart | None = None
    """Expert's part of a stack; None = the product is no expert's"""

    @property
    def names(self) -> Iterator[str]:
        """All names of the product's layers in adapters."""
        for module in self.modules:
            yield from filter(None, (module.name, module.alias))
        if self.stacked is not None:
            yield self.stacked.name


class AdapterChange(IntEnum):
    """Change of a decoder's adapters, in which all ranks take part."""

    READ = 0
    INSERT = 1
    DROP = 2


@dataclass(frozen=True, slots=True)
class ConvertedAdapter:
    """An adapter in the layout of a decoder's products."""

    parts: Sequence[Sequence[LowRank]]
    """Parts of each product of the decoder"""
    num_bytes: int


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
        self._ranks: dict[int, int] = {}
        """Largest rank of each adapter that graphs can hold, by number"""
        self._kept: RowGroups | None = None
        self.rows: RowGroups | None = None
        """Rows of the present product by adapter; None = no row has one"""

    def delta(self, site: Site) -> Delta:
        """Make what adapters add to a product."""
        return self._delta(site)

    def of_sequences(self, site: Site) -> SequenceDelta:
        """Make what adapters add to a product whose rows are not those of the step."""
        return self._delta(site)

    def of_table(self, site: Site) -> TableDelta:
        """Make what adapters add to an embedding, a product of one-hot rows."""
        return self._delta(site)

    def _delta(self, site: Site, *, is_expert: bool = False) -> "_SiteDelta":
        delta = _SiteDelta(self, site, self._operators, is_expert=is_expert)
        self._deltas.append(delta)
        return delta

    def experts(self, sites: Iterable[tuple[Site, Site]]) -> ExpertDeltas:
        """Make what adapters add to a layer's experts. sites: gate and down of each expert."""
        pairs = [
            (self._delta(gate, is_expert=True), self._delta(down, is_expert=True))
            for gate, down in sites
        ]
        return _ExpertDeltas(self, [gate for gate, _ in pairs], [down for _, down in pairs])

    def load(self, number: int, adapter: PeftAdapter) -> int:
        """Keep an adapter's weights; return their bytes. Raises CheckpointError as `convert`."""
        converted = self.convert(adapter)
        self.insert(number, converted)
        return converted.num_bytes

    def convert(self, adapter: PeftAdapter) -> ConvertedAdapter:
        """Convert an adapter for `insert`. It may run beside a pass.

        Raises CheckpointError if the adapter does not fit the model.
        """
        pairs = {_without_root(name, self._roots): pair for name, pair in adapter.pairs.items()}
        known = {name for delta in self._deltas for name in delta.site.names}
        if unknown := sorted(pairs.keys() - known):
            raise CheckpointError(
                f"{unknown[0]} can't have an adapter. Supported are those of attention's "
                "projections, feed-forward layers, experts and their routers, not of embeddings, "
                "the output projection, and products that several depths share."
            )
        parts = [self._parts(delta.site, pairs) for delta in self._deltas]
        return ConvertedAdapter(parts, sum(part.num_bytes for each in parts for part in each))

    def insert(self, number: int, adapter: ConvertedAdapter) -> None:
        """Keep an adapter's weights, between two passes."""
        changed = [
            (delta, parts)
            for delta, parts in zip(self._deltas, adapter.parts, strict=True)
            if parts
        ]
        for delta, parts in changed:
            delta.change(number, parts)
        if not any(delta.is_expert for delta, _ in changed):
            ranks = (len(part.down) for _, parts in changed for part in parts)
            self._ranks[number] = max(ranks, default=0)

    def reserve(self, most: int) -> None:
        """Reserve the memory that tells graphs where the weights of adapters lie.

        most: largest number of an adapter.
        """
        for delta in self._deltas:
            delta.reserve(most)

    @property
    def are_capturable(self) -> bool:
        """True if graphs of passes can hold the additions of adapters."""
        return self._operators.finds_adapters

    def fit_graphs(self, numbers: Iterable[int]) -> bool:
        """Return whether graphs hold the additions of these adapters, those of experts excepted."""
        ranks = [self._ranks.get(number) for number in set(numbers) - {0}]
        return all(rank is not None and rank <= GRAPH_RANK for rank in ranks)

    def layers(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, inputs and outputs of each linear layer that may have an adapter."""
        for delta in self._deltas:
            for module in delta.site.modules:
                yield module.name, delta.site.inputs, module.outputs

    def unload(self, number: int) -> None:
        """Drop an adapter's weights."""
        self._ranks.pop(number, None)
        for delta in self._deltas:
            delta.change(number, ())

    def begin(self, batch: StepBatch) -> None:
        """Prepare the adapters of the pass that follows."""
        outputs = batch.output_rows
        if (staged := batch.adapters) is not None:
            self.rows = self._kept = _staged(staged)
            if outputs is not None:
                self._kept = _staged(staged.index_select(0, outputs.indices))
            return
        numbers = batch.adapters_host
        self.rows = self._groups(numbers, batch.query_lengths_host)
        self._kept = self.rows if outputs is None else self._groups(numbers, outputs.lengths_host)

    def narrow(self) -> None:
        """Continue the pass with its output rows alone."""
        self.rows = self._kept

    def end(self) -> None:
        """Compute without adapters again."""
        self.rows = self._kept = None

    @contextmanager
    def routed(self, index: Tensor) -> Iterator[None]:
        """Continue with the present rows `index`, int64 [n], until the context ends."""
        rows = self.rows
        assert rows is not None
        self.rows = self.grouped(rows.owners[index.cpu()])
        try:
            yield
        finally:
            self.rows = rows

    def _groups(self, numbers: Sequence[int], lengths: Sequence[int]) -> RowGroups:
        owners = torch.tensor(numbers, dtype=torch.int32)
        return self.grouped(owners.repeat_interleave(torch.tensor(lengths)))

    def grouped(self, owners: Tensor) -> RowGroups:
        """Group rows by adapter. owners: as in `RowGroups`."""
        numbers = set(owners.tolist())
        used = sorted(numbers - {0})
        on_device = None
        if self._operators.finds_adapters:
            on_device = SortedRows.of(to_device(owners, self._device))
        if len(used) == 1 and 0 not in numbers:
            return RowGroups((RowGroup(used[0], None),), owners, on_device)
        places = ((number, torch.where(owners == number)[0]) for number in used)
        groups = (RowGroup(number, to_device(place, self._device)) for number, place in places)
        return RowGroups(tuple(groups), owners, on_device)

    def _parts(self, site: Site, pairs: dict[str, LowRankPair]) -> list[LowRank]:
        parts, first = [], 0
        for module in site.modules:
            if (pair := pairs.get(module.name) or pairs.get(module.alias)) is not None:
                parts.append(
                    self._part(site, module.name, module.outputs, pair, first, module.factors)
                )
            first += module.outputs
        stacked = site.stacked
        if stacked is not None and (pair := pairs.get(stacked.name)) is not None:
            part = self._part(site, stacked.name, stacked.outputs, stacked.of(pair), 0)
            parts.append(part)
        return parts

    def _part(
        self,
        site: Site,
        name: str,
        wanted: int,
        pair: LowRankPair,
        first: int,
        factors: Tensor | None = None,
    ) -> LowRank:
        """Convert an adapter of `wanted` outputs from `first` on, which have these factors."""
        inputs, outputs = pair.down.shape[1], pair.up.shape[0]
        if (inputs, outputs) != (site.inputs, wanted):
            raise CheckpointError(
                f"the adapter of {name} has {inputs} inputs and {outputs} outputs, the "
                f"model {site.inputs} and {wanted}."
            )
        down, up = pair.down.float(), pair.up.float() * pair.scale
        if factors is not None:
            up = up * factors[:, None]
        if site.columns is not None:
            down = down[:, site.columns]
        if site.order is not None:
            places = torch.where((site.order >= first) & (site.order < first + outputs))[0]
            up = up[site.order[places] - first]
            first = int(places[0])
        if site.fold is not None:
            up = site.fold(up)
        bias = None if site.norm_bias is None else self._own(down @ site.norm_bias.float())
        return LowRank(self._own(down), bias, self._own(up.float().T), first)

    def _own(self, tensor: Tensor) -> Tensor:
        """Copy a tensor in any case: a view of the mapped file would change with the file."""
        layout = torch.contiguous_format
        return tensor.to(self._device, self._dtype, copy=True, memory_format=layout)


class _SiteDelta(Delta, SequenceDelta, TableDelta):
    """Additions of the adapters to one product."""

    def __init__(
        self, adapters: Adapters, site: Site, operators: Operators, *, is_expert: bool
    ) -> None:
        """is_expert: whether the product is that of an expert, which no graph adapts."""
        self._adapters = adapters
        self.site = site
        self.is_expert = is_expert
        self._parts: dict[int, Sequence[LowRank]] = {}
        """Parts by number of the adapter; adapters that do not change this product are missing"""
        widths = [module.outputs for module in site.modules]
        if site.stacked is not None:
            widths.append(site.stacked.outputs)
        self._product = operators.low_rank(len(widths), max(widths, default=0))

    def change(self, number: int, parts: Sequence[LowRank]) -> None:
        """Replace an adapter's parts; none remove it."""
        if parts:
            self._parts[number] = parts
        elif self._parts.pop(number, None) is None:
            return
        self._product.change(number, parts)

    def reserve(self, most: int) -> None:
        """Reserve memory as `LowRankProduct.reserve`, if graphs hold this product."""
        if not self.is_expert:
            self._product.reserve(most)

    @property
    def is_active(self) -> bool:
        rows = self._adapters.rows
        return rows is not None and (bool(self._parts) or rows.is_staged)

    def changes(self, rows: RowGroups) -> bool:
        """Return whether any of these rows has an adapter of this product, as far as is known."""
        return any(group.number in self._parts for group in rows.groups)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        groups = self._adapters.rows
        if groups is not None and (groups.is_staged or self.changes(groups)):
            self._product.add_to(rows, out, groups)

    def changes_for(self, number: int) -> bool:
        return number in self._parts

    def add_for(self, number: int, rows: Tensor, out: Tensor) -> None:
        owners = torch.full((len(rows),), number, dtype=torch.int32)
        self._product.add_to(rows, out, self._adapters.grouped(owners))

    def add_rows(self, index: Tensor, out: Tensor) -> None:
        groups = self._adapters.rows
        for group in () if groups is None else groups.groups:
            places = slice(None) if group.index is None else group.index
            for part in self._parts.get(group.number, ()):
                out[places] += part.down[:, index[places]].T @ part.up


class _ExpertDeltas(ExpertDeltas):
    """Additions of the adapters to the products of a layer's experts."""

    def __init__(
        self, adapters: Adapters, gates: Sequence[_SiteDelta], downs: Sequence[_SiteDelta]
    ) -> None:
        self._adapters = adapters
        self._all = (*gates, *downs)
        self.gates = gates
        self.downs = downs

    @property
    def is_active(self) -> bool:
        rows = self._adapters.rows
        return rows is not None and any(delta.changes(rows) for delta in self._all)

    def routed(self, index: Tensor) -> AbstractContextManager[None]:
        return self._adapters.routed(index)


def _staged(numbers: Tensor) -> RowGroups:
    """Return rows whose adapters the device alone knows."""
    owners = torch.empty(0, dtype=torch.int32)
    return RowGroups((), owners, SortedRows.of(numbers), is_staged=True)


def _without_root(name: str, roots: Sequence[str]) -> str:
    """Return a layer's name without the prefix of its checkpoint."""
    root = next((root for root in roots if name.startswith(root)), "")
    return name.removeprefix(root)
