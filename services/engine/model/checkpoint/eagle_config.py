"""config.json of EAGLE-3 heads. Free of torch."""

from collections.abc import Sequence

from services.common.model_files.draft_heads import is_eagle_name
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["NUM_DEPTHS", "eagle_depths", "is_eagle"]

NUM_DEPTHS = 3
"""Number of layers whose hidden states a head reads"""


def is_eagle(config: Config) -> bool:
    """Return whether a config.json describes an EAGLE-3 head."""
    names = config.values.get("architectures")
    return isinstance(names, list) and any(is_eagle_name(str(name)) for name in names)


def eagle_depths(config: Config, num_layers: int) -> Sequence[int]:
    """Return the numbers of layers behind which the head reads the residual.

    num_layers: number of layers of the engine's model. `eagle_config` lists layers whose outputs
    are read; `eagle_aux_hidden_state_layer_ids` beside it lists layers whose inputs are read.
    Raises CheckpointError for layers that the model does not have.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    section = config.section("eagle_config")
    depths: Sequence[int] = (2, num_layers // 2, num_layers - 3)
    if section.values.get(key):
        depths = [layer + 1 for layer in section.integers(key)]
    elif config.values.get(key):
        depths = config.integers(key)
    if len(depths) != NUM_DEPTHS or not all(0 <= depth < num_layers for depth in depths):
        raise CheckpointError(
            f"{config.file}: the head reads {len(depths)} hidden states, behind "
            f"{', '.join(map(str, depths))} layers; it must read {NUM_DEPTHS}, and the model has "
            f"{num_layers} layers."
        )
    return depths
