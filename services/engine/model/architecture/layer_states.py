"""Numbers that recurrent layers and convolutions keep of a sequence, whatever its length."""

from dataclasses import dataclass

from services.engine.model.architecture.convolution_shape import ConvolutionShape
from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.architecture.gated_unit_shape import GatedUnitShape
from services.engine.model.architecture.layers import (
    AttentionSpec,
    ConvolvedFeedForward,
    MixerSpec,
    ParallelSpec,
)
from services.engine.model.architecture.lightning_shape import LightningShape
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.architecture.selective_shape import SelectiveShape

__all__ = ["StateSize", "state_size"]


@dataclass(frozen=True, slots=True)
class StateSize:
    """Count of the numbers of a sequence's states."""

    inputs: int = 0
    """Inputs of convolutions by the last tokens, in the model's dtype"""
    recurrent: int = 0
    """Numbers that each token changes, in the dtype of recurrent states"""

    def __add__(self, other: "StateSize") -> "StateSize":
        return StateSize(self.inputs + other.inputs, self.recurrent + other.recurrent)


def state_size(mixer: MixerSpec, hidden_size: int) -> StateSize:
    """Return what one layer's mixer keeps. hidden_size: width of the residual."""
    match mixer:
        case DeltaShape():
            recurrent = mixer.value_heads * mixer.key_dim * mixer.value_dim
            return StateSize(_inputs(mixer.conv_width, mixer.channels), recurrent)
        case MambaShape():
            recurrent = mixer.heads * mixer.state_width * mixer.head_dim
            return StateSize(_inputs(mixer.conv_width, mixer.channels), recurrent)
        case SelectiveShape():
            recurrent = mixer.state_width * mixer.channels
            return StateSize(_inputs(mixer.conv_width, mixer.channels), recurrent)
        case GatedUnitShape():
            return StateSize(_inputs(mixer.conv_width, mixer.channels), mixer.channels)
        case LightningShape():
            return StateSize(recurrent=mixer.heads * mixer.head_dim**2)
        case ConvolutionShape():
            return StateSize(_inputs(mixer.conv_width, mixer.channels))
        case ConvolvedFeedForward():
            return StateSize(_inputs(mixer.conv_width, hidden_size))
        case ParallelSpec():
            return state_size(mixer.mamba, hidden_size)
        case AttentionSpec() if mixer.relative is not None:
            channels = mixer.cached_width + hidden_size
            return StateSize(_inputs(mixer.relative.conv_width, channels))
        case _:
            return StateSize()


def _inputs(conv_width: int, channels: int) -> int:
    """Return the numbers that a convolution over `conv_width` tokens keeps of earlier ones."""
    return (conv_width - 1) * channels
