"""Layers without keys of their own, which read those of an earlier layer."""

from collections.abc import Sequence

from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["layers_read"]


def layers_read(config: Config, has_window: Sequence[bool]) -> list[int | None]:
    """Return for each layer the number of the layer whose keys it reads; None: it has its own.

    The last num_kv_shared_layers layers have no keys of their own. Those with a window read the
    keys of the last earlier layer with one, the others those of the last one without. Raises
    CheckpointError if there is no such layer.
    """
    count = len(has_window)
    first_shared = count - config.integer("num_kv_shared_layers", 0)
    if not 0 <= first_shared <= count:
        raise CheckpointError(f"{config.file}: num_kv_shared_layers exceeds the number of layers.")
    last = {has_window[layer]: layer for layer in range(first_shared)}
    for layer in range(first_shared, count):
        if has_window[layer] not in last:
            raise CheckpointError(
                f"{config.file}: layer {layer} shares the keys of an earlier one, but none is "
                "alike."
            )
    return [None if layer < first_shared else last[has_window[layer]] for layer in range(count)]
