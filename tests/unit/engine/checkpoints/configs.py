"""Small configs of all families."""

from transformers import PreTrainedConfig

from tests.unit.engine.checkpoints.dense import DENSE
from tests.unit.engine.checkpoints.images import IMAGES
from tests.unit.engine.checkpoints.mixtures import MIXTURES
from tests.unit.engine.checkpoints.recurrent import RECURRENT

CONFIGS: dict[str, PreTrainedConfig] = {**DENSE, **MIXTURES, **RECURRENT, **IMAGES}
