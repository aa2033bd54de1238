"""Recording of a pass through the layers, replayed by one call."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, byref, c_double
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.library import Native
from services.engine.kernels.structures import OperationCall, PassCall, TablesCall
from services.engine.model.attention import KVCache

__all__ = ["Recording"]


class Recording:
    """Runner of a decoder's layers: the first pass kernel by kernel, later ones by one replay.

    Passes differ only in their rows and cache slots while the decoder's buffers and the cache stay
    in place. A pass in which torch computes anything, such as the choice of an indexer, is never
    recorded.
    """

    def __init__(self, native: Native, *, only_decodes: bool = False) -> None:
        """only_decodes: steps with prompt chunks are not recorded; torch attends for them."""
        self._native = native
        self._only_decodes = only_decodes
        self._operations: Array[OperationCall] | None = None
        self._cache: KVCache | None = None
        """The cache that the operations read and write"""
        self._is_recordable = True

    def run(self, batch: StepBatch, cache: KVCache, layers: Callable[[], None]) -> None:
        """Replay the recorded operations, or run `layers` and record them."""
        if self._only_decodes and not (batch.is_decode and batch.output_rows is None):
            layers()
            return
        if cache is not self._cache:
            self.discard()
        if self._operations is not None:
            self.replay(self._operations, batch)
        elif self._is_recordable:
            self._record(cache, layers)
        else:
            layers()

    def discard(self) -> None:
        """Drop the recording, because buffers or cache have moved."""
        self._operations = self._cache = None

    def replay(
        self,
        operations: Array[OperationCall],
        batch: StepBatch,
        seconds: Array[c_double] | None = None,
    ) -> None:
        """Run the operations on the batch's rows.

        seconds: one entry for each `Kernel`, to which its run time is added.
        """
        kept = batch.output_rows
        count = 1 if self._cache is None else max(len(self._cache.groups), 1)
        groups = [batch.of_group(number) for number in range(count)]
        kept_ends = [_kept_ends(group) for group in groups]  # they must outlive the call
        tables = (TablesCall * count)(*map(_tables_of, groups, kept_ends))
        states = batch.states
        call = PassCall(
            tables,
            batch.query_starts.data_ptr(),
            batch.context_lengths.data_ptr(),
            None if kept is None else kept.indices.data_ptr(),
            None if kept is None else kept.starts.data_ptr(),
            None if states is None else states.starts.data_ptr(),
            None if states is None else states.sources.data_ptr(),
            None if states is None else states.targets.data_ptr(),
            len(batch.slots),
            len(batch.context_lengths),
            0 if kept is None else len(kept.indices),
            0 if states is None else len(states.targets),
            None if seconds is None else addressof(seconds),
        )
        self._native.replay(operations, len(operations), byref(call))

    def _record(self, cache: KVCache, layers: Callable[[], None]) -> None:
        detector = _TorchCallDetector()  # type: ignore[no-untyped-call]
        with detector, self._native.recorded() as operations:
            layers()
        self._is_recordable = not detector.was_called
        if self._is_recordable:
            self._operations = (OperationCall * len(operations))(*operations)
            self._cache = cache


def _kept_ends(batch: StepBatch) -> Tensor | None:
    return None if batch.visible_ends is None else batch.narrowed.visible_ends


def _tables_of(batch: StepBatch, kept_ends: Tensor | None) -> TablesCall:
    tables, ends = batch.block_tables, batch.visible_ends
    return TablesCall(
        batch.slots.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        None if ends is None else ends.data_ptr(),
        None if kept_ends is None else kept_ends.data_ptr(),
    )


class _TorchCallDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detector of torch operations that run within it."""

    was_called = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: nothing is compiled here, and True would import torch._dynamo for 1 s."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.was_called = True
        return func(*args, **(kwargs or {}))
