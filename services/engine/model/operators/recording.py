"""The kernels of a pass through the layers, recorded once and then run by one call."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, byref, c_double
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.library import Native, OperationCall, PassCall
from services.engine.model.attention import KVCache

__all__ = ["Recording"]


class Recording:
    """Runs a decoder's layers: kernel by kernel at first, from then on all of them at once.

    A pass differs from another only in its rows and where they are cached, as long as the decoder's
    buffers and the cache stay where they are. Where torch computes anything between the kernels,
    for a mixture of experts say, nothing can be recorded, and layers are run as ever.
    """

    def __init__(self, native: Native) -> None:
        self._native = native
        self._operations: Array[OperationCall] | None = None
        self._cache: KVCache | None = None
        """Which the operations read and write"""
        self._is_possible = True

    def run(self, batch: StepBatch, cache: KVCache, layers: Callable[[], None]) -> None:
        """Run `layers` over the batch, or what they ran before."""
        if cache is not self._cache:
            self.forget()
        if self._operations is not None:
            self.replay(self._operations, batch)
        elif self._is_possible:
            self._record(cache, layers)
        else:
            layers()

    def forget(self) -> None:
        """Record anew: what kernels read and write has moved."""
        self._operations = self._cache = None

    def replay(
        self,
        operations: Array[OperationCall],
        batch: StepBatch,
        seconds: Array[c_double] | None = None,
    ) -> None:
        """seconds: [kinds of kernels], to which is added what each takes."""
        kept = batch.output_rows
        rows = PassCall(
            batch.slots.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lengths.data_ptr(),
            batch.block_tables.data_ptr(),
            None if kept is None else kept.indices.data_ptr(),
            None if kept is None else kept.starts.data_ptr(),
            batch.block_tables.stride(0),
            len(batch.slots),
            len(batch.context_lengths),
            0 if kept is None else len(kept.indices),
            seconds,
        )
        self._native.replay(operations, len(operations), byref(rows))

    def _record(self, cache: KVCache, layers: Callable[[], None]) -> None:
        witness = _Witness()  # type: ignore[no-untyped-call]
        with witness, self._native.noting() as notes:
            layers()
        self._is_possible = not witness.was_called
        if self._is_possible:
            self._operations = (OperationCall * len(notes))(*notes)
            self._cache = cache


class _Witness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether torch was asked to do anything."""

    was_called = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.was_called = True
        return func(*args, **(kwargs or {}))
