"""Latent attention of decodes on the CPU kernels."""

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.library import DTYPES, Kernel, Native, native
from services.engine.kernels.structures import LatentCall
from services.engine.model.architecture.latent_spec import LatentSpec

__all__ = ["NativeLatentDecodes", "choose_latent_decodes"]


class NativeLatentDecodes:
    """One layer's absorbed decodes in float32 and bfloat16 on any CPU, by a recordable kernel."""

    def __init__(
        self, native: Native, spec: LatentSpec, keys: Tensor, values: Tensor, group: int
    ) -> None:
        """keys, values: as in `LatentWeights`; group: number of the layer's cache group."""
        self._native = native
        self._spec = spec
        self._keys = keys
        self._values = values
        self._group = group

    def attend(
        self, queries: Tensor, latents: Tensor | None, pages: Tensor, batch: StepBatch, out: Tensor
    ) -> None:
        """Write the latents of all tokens, and fill the rows of `out` of sequences that decode.

        queries, pages, out: as in `LatentAttention.attend`, contiguous; latents: [tokens,
        absorbed_width], or None if the pages hold them.
        """
        spec = self._spec
        call = LatentCall(
            queries.data_ptr(),
            None if latents is None else latents.data_ptr(),
            self._keys.data_ptr(),
            self._values.data_ptr(),
            out.data_ptr(),
            pages.data_ptr(),
            batch.slots.data_ptr(),
            batch.context_lengths.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            len(batch.slots),
            batch.num_decodes,
            spec.num_heads,
            spec.latent_width,
            spec.key_width,
            spec.shared_width,
            spec.value_width,
            pages.shape[2],
            pages.shape[1],
            self._group,
            spec.scale,
            DTYPES[self._keys.dtype],
        )
        self._native.run(Kernel.LATENT_DECODE, call)


def choose_latent_decodes(
    spec: LatentSpec, keys: Tensor, values: Tensor, group: int
) -> NativeLatentDecodes | None:
    """Return the kernel for this machine, dtype and shape; None = torch must attend."""
    is_supported = keys.device.type == "cpu" and keys.dtype in (torch.float32, torch.bfloat16)
    if native is None or not is_supported:
        return None
    return NativeLatentDecodes(native, spec, keys, values, group)
