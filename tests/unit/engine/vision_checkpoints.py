"""Small random vision-language checkpoints of every architecture, with their image processors."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoModel,
    CLIPVisionConfig,
    Exaone4_5_Config,
    Exaone4Config,
    Gemma3Config,
    Gemma3nAudioConfig,
    Gemma3nConfig,
    Gemma3nTextConfig,
    Gemma3nVisionConfig,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm4vMoeTextConfig,
    Glm4vTextConfig,
    Glm4vVisionConfig,
    Glm46VConfig,
    GlmOcrConfig,
    GlmOcrTextConfig,
    Idefics3Config,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLTextConfig,
    Qwen2VLConfig,
    Qwen2VLTextConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeTextConfig,
    Qwen3VLTextConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from services.engine.vision.mobilenet_v5 import MobileNetV5
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import (
    DELTA_NET,
    EXPERTS,
    GEMMA3N,
    GEMMA4,
    ROUTED,
    SHAPE,
    VOCABULARY,
    WIDE,
)
from tests.unit.engine.gemma4_unified import Gemma4UnifiedImageProcessor

__all__ = [
    "IMAGE_TOKEN",
    "VISION_MODELS",
    "VisionModel",
    "features",
    "make_vision_checkpoint",
    "png",
]

IMAGE_TOKEN = 90
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "initializer_range": 0.2,
}
_MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}
_HALF_MROPE = _MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}
_GLM_TOWER: dict[str, Any] = {
    **{key: value for key, value in _QWEN_TOWER.items() if key != "temporal_patch_size"},
    "image_size": 56,
    "intermediate_size": 48,
    "out_hidden_size": 64,
}
_GLM_IMAGES: dict[str, Any] = {"size": {"shortest_edge": 8 * 28 * 28, "longest_edge": 48 * 28 * 28}}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}


@dataclass(frozen=True, slots=True)
class VisionModel:
    """One architecture."""

    config: PreTrainedConfig
    processor: Any
    """As transformers' processor class calls it"""
    stored: dict[str, Any] = field(default_factory=dict)
    """Settings that have other values in preprocessor_config.json"""

    def save_processor(self, directory: Path) -> None:
        """Write preprocessor_config.json."""
        self.processor.save_pretrained(directory)
        file = directory / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **self.stored}))


def _idefics(kind: Any, processor: Any) -> VisionModel:
    vision = {**_TOWER, "image_size": 28, "patch_size": 7}
    config = kind(
        text_config=LlamaConfig(**SHAPE),
        vision_config=vision,
        scale_factor=2,
        image_token_id=IMAGE_TOKEN,
        **_UNTIED,
    )
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    return VisionModel(config, processor(**sizes))


def _qwen_processor(patch: int = 14) -> Qwen2VLImageProcessorPil:
    limits = {"shortest_edge": 4 * 28 * 28, "longest_edge": 24 * 28 * 28}
    return Qwen2VLImageProcessorPil(size=limits, patch_size=patch)


def _gemma4(text: dict[str, Any], tower: dict[str, Any]) -> VisionModel:
    """Return a Gemma 4 whose images have up to 70 tokens, many more than a window's."""
    whole = {**GEMMA4, "max_position_embeddings": 512, "vocab_size_per_layer_input": VOCABULARY}
    vision = {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 256}
    config = Gemma4Config(
        text_config=Gemma4TextConfig(**whole | text),
        vision_config={**vision, "patch_size": 4, "pooling_kernel_size": 2, **tower},
        image_token_id=IMAGE_TOKEN,
        boi_token_id=91,
        eoi_token_id=92,
        video_token_id=VOCABULARY,  # no text has these tokens
        audio_token_id=VOCABULARY + 1,
    )
    settings: dict[str, Any] = {
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    }
    return VisionModel(config, Gemma4ImageProcessorPil(**settings))


def _gemma4_unified() -> VisionModel:
    """Return a Gemma 4 Unified whose images have up to 70 tokens, many more than a window's."""
    vision = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 80}
    config = Gemma4UnifiedConfig(
        text_config=Gemma4UnifiedTextConfig(**GEMMA4 | {"max_position_embeddings": 512}),
        vision_config={**vision, "output_proj_dims": 32, "initializer_range": 0.2},
        audio_config={"audio_embed_dim": 16},
        image_token_id=IMAGE_TOKEN,
        boi_token_id=91,
        eoi_token_id=92,
        video_token_id=VOCABULARY,  # no text has these tokens
        audio_token_id=VOCABULARY + 1,
    )
    settings: dict[str, Any] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    return VisionModel(config, Gemma4UnifiedImageProcessor(**settings))


class _TimmTower(PreTrainedModel):
    """Stands for transformers' wrapper of timm, which the tests do without.

    A test of its own compares the tower with timm's.
    """

    config: Gemma3nVisionConfig

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.timm_model = MobileNetV5(config.hidden_size, 2, 1 / 16)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.timm_model(pixel_values.to(self.dtype)))


AutoModel.register(Gemma3nVisionConfig, _TimmTower, exist_ok=True)


def _gemma3n() -> VisionModel:
    """Return a Gemma 3n whose marks of images are not embedded by the text's table."""
    text = {**GEMMA3N, "vocab_size_per_layer_input": IMAGE_TOKEN, "max_position_embeddings": 512}
    config = Gemma3nConfig(
        text_config=Gemma3nTextConfig(**text, num_kv_shared_layers=2, intermediate_size=96),
        vision_config=Gemma3nVisionConfig(
            hidden_size=32,
            vocab_size=5,
            vocab_offset=IMAGE_TOKEN,
            model_args={"channel_multiplier": 1 / 16, "msfa_output_resolution": 2},
        ),
        audio_config=Gemma3nAudioConfig(
            hidden_size=32,
            vocab_size=4,
            vocab_offset=IMAGE_TOKEN + 4,
            input_feat_size=16,
            conf_num_attention_heads=2,
            conf_num_hidden_layers=1,
            sscp_conv_channel_size=(4, 4),
        ),
        vision_soft_tokens_per_image=4,
        image_token_id=IMAGE_TOKEN,
        boi_token_id=91,
        eoi_token_id=92,
        audio_token_id=VOCABULARY + 1,  # no text has this token
    )
    settings: dict[str, Any] = {"size": {"height": 64, "width": 64}, "do_normalize": False}
    return VisionModel(config, SiglipImageProcessorPil(**settings))


_PIXTRAL = PixtralVisionConfig(**_TOWER, image_size=56, patch_size=7)
_PIXTRAL_SIZE: dict[str, Any] = {"size": {"longest_edge": 56}}

VISION_MODELS: dict[str, VisionModel] = {
    "llava": VisionModel(
        LlavaConfig(
            text_config=LlamaConfig(**SHAPE),
            vision_config=CLIPVisionConfig(**_TOWER, image_size=28, patch_size=7),
            image_token_index=IMAGE_TOKEN,
        ),
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
    ),
    "llava, pixtral": VisionModel(
        LlavaConfig(
            text_config=MistralConfig(**SHAPE, sliding_window=None),
            vision_config=_PIXTRAL,
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        PixtralImageProcessorPil(patch_size={"height": 7, "width": 7}, **_PIXTRAL_SIZE),
    ),
    "mistral3": VisionModel(
        Mistral3Config(
            text_config=MistralConfig(**SHAPE, sliding_window=None),
            vision_config=_PIXTRAL,
            image_token_index=IMAGE_TOKEN,
            spatial_merge_size=2,
            **_UNTIED,
        ),
        PixtralImageProcessorPil(patch_size={"height": 14, "width": 14}, **_PIXTRAL_SIZE),
        stored={"patch_size": 7},  # as Mistral Small 3.1: the edge of a patch, not of a token
    ),
    "gemma3": VisionModel(
        Gemma3Config(
            text_config=Gemma3TextConfig(
                **WIDE | {"tie_word_embeddings": True, "sliding_window_pattern": 2},
                query_pre_attn_scalar=24,
                sliding_window=9,
            ),
            vision_config=SiglipVisionConfig(
                **_TOWER, image_size=28, patch_size=7, vision_use_head=False
            ),
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=91,
            eoi_token_index=92,
        ),
        Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
    ),
    "gemma3n": _gemma3n(),
    "gemma4": _gemma4(
        {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "pad_token_id": 5},
        {"use_clipped_linears": True},
    ),
    "gemma4 unified": _gemma4_unified(),
    "gemma4, images see ahead": _gemma4(
        {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
        {"standardize": True},
    ),
    "idefics3": _idefics(Idefics3Config, Idefics3ImageProcessorPil),
    "smolvlm": _idefics(SmolVLMConfig, SmolVLMImageProcessorPil),
    "qwen2 vl": VisionModel(
        Qwen2VLConfig(
            text_config=Qwen2VLTextConfig(**SHAPE, rope_parameters=_MROPE),
            vision_config={
                **{key: value for key, value in _QWEN_TOWER.items() if key != "hidden_size"},
                "embed_dim": 32,
                "hidden_size": 64,
                "mlp_ratio": 2,
            },
            image_token_id=IMAGE_TOKEN,
        ),
        _qwen_processor(),
    ),
    "qwen2.5 vl": VisionModel(
        Qwen2_5_VLConfig(
            text_config=Qwen2_5_VLTextConfig(**SHAPE, rope_parameters=_MROPE),
            vision_config={
                **_QWEN_TOWER,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            image_token_id=IMAGE_TOKEN,
        ),
        _qwen_processor(),
    ),
    "qwen3 vl": VisionModel(
        Qwen3VLConfig(
            text_config=Qwen3VLTextConfig(
                **WIDE, rope_parameters=_MROPE | {"mrope_section": [8, 4, 4]}
            ),
            vision_config={
                **_QWEN_TOWER,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 2],
            },
            image_token_id=IMAGE_TOKEN,
        ),
        _qwen_processor(),
    ),
    "exaone4.5": VisionModel(
        Exaone4_5_Config(
            text_config=Exaone4Config(**SHAPE, sliding_window=9, sliding_window_pattern=2),
            vision_config={
                **_QWEN_TOWER,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "window_size": 56,
                "fullatt_block_indexes": [1],
                "num_key_value_heads": 1,
            },
            image_token_id=IMAGE_TOKEN,
        ),
        _qwen_processor(),
    ),
    "glm4v": VisionModel(
        Glm4vConfig(
            text_config=Glm4vTextConfig(**SHAPE, rope_parameters=_HALF_MROPE),
            vision_config=_GLM_TOWER,
            image_token_id=IMAGE_TOKEN,
        ),
        Glm4vImageProcessorPil(**_GLM_IMAGES),
    ),
    "glm4v moe": VisionModel(
        Glm4vMoeConfig(
            text_config=Glm4vMoeTextConfig(
                **WIDE | ROUTED, rope_parameters=_HALF_MROPE | {"mrope_section": [4, 2, 2]}
            ),
            vision_config=_GLM_TOWER,
            image_token_id=IMAGE_TOKEN,
        ),
        Glm46VImageProcessorPil(**_GLM_IMAGES),
    ),
    "glm4.6v flash": VisionModel(
        Glm46VConfig(
            text_config=Glm4vTextConfig(**SHAPE, rope_parameters=_HALF_MROPE),
            vision_config=Glm4vVisionConfig(**_GLM_TOWER),
            image_token_id=IMAGE_TOKEN,
        ),
        Glm46VImageProcessorPil(**_GLM_IMAGES),
    ),
    "glm ocr": VisionModel(
        GlmOcrConfig(
            text_config=GlmOcrTextConfig(  # type: ignore[call-arg]
                **SHAPE,
                head_dim=32,
                rope_parameters=_MROPE | {"mrope_section": [4, 6, 6]},
            ),
            vision_config=_GLM_TOWER,
            image_token_id=IMAGE_TOKEN,
        ),
        Glm46VImageProcessorPil(**_GLM_IMAGES),
    ),
    "qwen3.5 vl": VisionModel(
        Qwen3_5Config(
            text_config=Qwen3_5TextConfig(
                **SHAPE | DELTA_NET, rope_parameters=_MROPE | {"mrope_section": [2, 1, 1]}
            ),
            vision_config={
                **_QWEN_TOWER,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
            },
            image_token_id=IMAGE_TOKEN,
        ),
        _qwen_processor(),
    ),
    "qwen3 vl moe": VisionModel(
        Qwen3VLMoeConfig(
            text_config=Qwen3VLMoeTextConfig(
                **WIDE, **EXPERTS, rope_parameters=_MROPE | {"mrope_section": [8, 4, 4]}
            ),
            vision_config={
                **_QWEN_TOWER,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            image_token_id=IMAGE_TOKEN,
        ),
        _qwen_processor(),
    ),
}


def make_vision_checkpoint(directory: Path, name: str) -> PreTrainedModel:
    """Save a checkpoint with its image processor; return the model as the reference."""
    model = make_checkpoint(directory, VISION_MODELS[name].config)
    VISION_MODELS[name].save_processor(directory)
    return model


@torch.no_grad()
def features(model: PreTrainedModel, processor: Any, *images: Image.Image) -> Tensor:
    """Return what transformers makes of images: [1 + deepstack layers, tokens, hidden size]."""
    whole: Any = model
    output = whole.model.get_image_features(**inputs(processor, list(images)))
    layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return torch.stack([torch.cat(tuple(layer)).flatten(0, -2) for layer in layers])


def inputs(processor: Any, images: Any) -> dict[str, Tensor]:
    """Return what the model reads of the processor's output."""
    output = processor(images=images, return_tensors="pt")
    names = (
        *("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw"),
        "image_position_ids",
    )
    return {name: torch.as_tensor(output[name]) for name in names if name in output}


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return an image file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
