"""Vision tower and projector of Gemma 3n."""

from torch import Tensor, nn
from transformers import Gemma3nConfig, Gemma3nTextConfig, Gemma3nVisionConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma3n.modeling_gemma3n import (
    Gemma3nMultimodalEmbedder,
    Gemma3nPreTrainedModel,
)

from services.engine.vision.mobilenet_v5 import MobileNetV5

__all__ = ["Gemma3nImages"]

_ARCHITECTURE = "mobilenetv5_300m_enc"


class Gemma3nImages(Gemma3nPreTrainedModel):
    """The part of transformers' `Gemma3nModel` that encodes images, without timm."""

    def __init__(self, config: Gemma3nConfig) -> None:
        """Make a model without weights. Raises ValueError for an unknown tower."""
        super().__init__(config)  # type: ignore[no-untyped-call]
        vision, text = config.vision_config, config.text_config
        assert isinstance(vision, Gemma3nVisionConfig)
        assert isinstance(text, Gemma3nTextConfig)
        tower = _tower(vision, config.vision_soft_tokens_per_image)
        self.vision_tower = nn.ModuleDict({"timm_model": tower})
        self.embed_vision = Gemma3nMultimodalEmbedder(vision, text)
        self._scale: float = vision.hidden_size**0.5

    def get_image_features(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        """Return the features of images as pooler_output: [images, tokens, hidden size]."""
        tower = self.vision_tower["timm_model"]
        tokens = tower(pixel_values).flatten(2).mT * self._scale
        return BaseModelOutputWithPooling(pooler_output=self.embed_vision(inputs_embeds=tokens))


def _tower(vision: Gemma3nVisionConfig, tokens: int | None) -> MobileNetV5:
    """Return the tower that makes `tokens` features of an image."""
    if vision.architecture != _ARCHITECTURE:
        raise ValueError(f"architecture must be {_ARCHITECTURE}, got {vision.architecture}")
    options = dict(vision.model_args or {})
    edge = options.pop("msfa_output_resolution", 16)
    multiplier = options.pop("channel_multiplier", 1.0)
    if options:
        raise ValueError(f"model_args has {', '.join(options)}, which is not supported")
    if not 0 < multiplier <= 1:
        raise ValueError(f"channel_multiplier must be above 0 and at most 1, got {multiplier}")
    if edge**2 != tokens:
        raise ValueError(f"vision_soft_tokens_per_image must be {edge**2}, got {tokens}")
    return MobileNetV5(vision.hidden_size, edge, multiplier)
