"""Vision-language architectures: a decoder of FAMILIES beside a vision tower."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.engine.model.checkpoint.attention_names import BlockIndexNames
from services.engine.model.checkpoint.config import CheckpointError, Config, JsonObject
from services.engine.model.checkpoint.expert_names import ExpertStack, ExpertTensorNames
from services.engine.model.checkpoint.families import FAMILIES
from services.engine.model.checkpoint.family import (
    Family,
    ImageSight,
    MultimodalAxes,
    QkNorm,
    WindowRule,
)
from services.engine.model.checkpoint.relative_families import PUBLISHED_INKLING
from services.engine.model.checkpoint.shared_names import MIXTRAL_EXPERTS

__all__ = ["VISION_LANGUAGE", "VisionLanguage"]

_SECTION = "text_config"
_SIGHT_KEY = "use_bidirectional_attention"

_COHERE2: JsonObject = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
}
_DECODERS: Mapping[str, tuple[str, JsonObject]] = {
    "cohere2": ("Cohere2ForCausalLM", _COHERE2),
    "cohere2_moe": ("Cohere2MoeForCausalLM", _COHERE2),
    "llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
    "mistral": (
        "MistralForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_attention_heads": 32,
            "max_position_embeddings": 262144,
        },
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "max_position_embeddings": 1048576,
        },
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
    ),
}
"""Decoders by the model_type of text_config, with transformers' defaults for its missing keys"""


@dataclass(frozen=True, slots=True)
class VisionLanguage:
    """One vision-language architecture."""

    architecture: str
    decoder: Family | None
    """The decoder's family; None: text_config names it"""
    roots: Mapping[str, str]
    """Roots of the decoder's names, as in `TensorNames.roots`"""
    vision: tuple[str, ...]
    """Patterns of the tensors that belong to the vision tower and its projector"""
    unserved_vision: tuple[str, ...] = ()
    """Patterns of the tensors of a tower that is not served: requests with images are refused"""
    others: tuple[str, ...] = ()
    """Patterns of tensors that are not read, such as those of a tower for sounds"""
    axes: MultimodalAxes = MultimodalAxes.NONE
    has_modal_tokens: bool = False
    """Value of `Family.has_modal_tokens`"""
    image_sight: ImageSight = ImageSight.NONE
    """Sight of the images; WINDOWS counts only if use_bidirectional_attention is "vision" """
    default_sight: str = "none"
    """Value of use_bidirectional_attention where text_config lacks the key"""

    def family(self, config: Config) -> Family:
        """Return the family of the decoder that `config` describes. Raises CheckpointError."""
        self._check_images(config)
        decoder, defaults = self._decoder(config)
        names = replace(
            decoder.names,
            roots=self.roots,
            ignored=(
                *decoder.names.ignored,
                *self.vision,
                *self.unserved_vision,
                *self.others,
            ),
        )
        return replace(
            decoder,
            architecture=self.architecture,
            names=names,
            section=_SECTION,
            defaults={**defaults, **decoder.defaults},
            multimodal_axes=self.axes,
            has_modal_tokens=self.has_modal_tokens,
            image_sight=self._sight(config),
            image_layers=1 + len(_deepstack(config)) if self.vision else 0,
        )

    def _check_images(self, config: Config) -> None:
        """Raise CheckpointError if the decoder can't treat images as the architecture demands."""
        text, tokens = config.section(_SECTION), config.positive("mm_tokens_per_image", 256)
        if self.image_sight is ImageSight.ALL and tokens > text.positive("sliding_window", 4096):
            raise CheckpointError(
                f"{config.file}: mm_tokens_per_image must be at most {_SECTION}'s sliding_window."
            )
        deepstack = _deepstack(config)
        if deepstack and len(deepstack) >= text.positive("num_hidden_layers", 32):
            raise CheckpointError(
                f"{config.file}: vision_config's deepstack_visual_indexes has {len(deepstack)} "
                f"layers; the decoder must have more."
            )

    def _sight(self, config: Config) -> ImageSight:
        """Return the sight of images that `config` asks for."""
        if self.image_sight is not ImageSight.WINDOWS:
            return self.image_sight
        text = config.section(_SECTION)
        # null means none, whatever the default is
        default = "none" if _SIGHT_KEY in text.values else self.default_sight
        asked = text.text(_SIGHT_KEY, default)
        return self.image_sight if asked == "vision" else ImageSight.NONE

    def _decoder(self, config: Config) -> tuple[Family, JsonObject]:
        if self.decoder is not None:
            return self.decoder, {}
        kind = config.section(_SECTION).text("model_type", "llama")
        if kind not in _DECODERS:
            raise CheckpointError(
                f"{config.file}: {_SECTION}'s model_type {kind} is not supported. Supported: "
                f"{', '.join(_DECODERS)}."
            )
        architecture, defaults = _DECODERS[kind]
        return FAMILIES[architecture], defaults


def _deepstack(config: Config) -> Sequence[int]:
    """Return the layers of the vision tower whose outputs decoder layers add."""
    return config.section("vision_config").ids("deepstack_visual_indexes")


_LLAVA = VisionLanguage(
    "LlavaForConditionalGeneration",
    decoder=None,
    roots={"language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head"},
    vision=("*vision_tower.*", "*multi_modal_projector.*"),
)
_IDEFICS3 = VisionLanguage(
    "Idefics3ForConditionalGeneration",
    decoder=None,
    roots={"model.text_model.": "lm_head"},
    vision=("model.vision_model.*", "model.connector.*"),
)
_QWEN2_VL = VisionLanguage(
    "Qwen2VLForConditionalGeneration",
    decoder=FAMILIES["Qwen2ForCausalLM"],
    roots={"model.": "lm_head", "model.language_model.": "lm_head"},
    vision=("visual.*", "model.visual.*"),
    axes=MultimodalAxes.IN_SECTIONS,
)
_QWEN3_MOE = FAMILIES["Qwen3MoeForCausalLM"]
_QWEN3_VL_MOE = replace(
    _QWEN3_MOE,
    names=replace(
        _QWEN3_MOE.names,
        experts=ExpertTensorNames(
            router="mlp.gate",
            gate=("mlp.experts.gate_up_proj",),
            down="mlp.experts.down_proj",
            stack=ExpertStack(in_any_order=True),
        ),
    ),
    defaults={
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "rope_theta": 500000.0,
    },
    windows=WindowRule.NONE,
)

_QWEN3_5 = replace(
    _QWEN2_VL,
    architecture="Qwen3_5ForConditionalGeneration",
    decoder=FAMILIES["Qwen3_5ForCausalLM"],
    axes=MultimodalAxes.INTERLEAVED_IN_A_QUARTER,
)

_EXAONE4 = FAMILIES["Exaone4ForCausalLM"]
_EXAONE4_5 = replace(
    _QWEN2_VL,
    architecture="Exaone4_5_ForConditionalGeneration",
    decoder=replace(
        _EXAONE4, names=replace(_EXAONE4.names, ignored=(*_EXAONE4.names.ignored, "mtp.*"))
    ),
    roots={"model.language_model.": "lm_head"},
    axes=MultimodalAxes.NONE,
)
_GLM4 = FAMILIES["Glm4ForCausalLM"]
_GLM4_MOE = FAMILIES["Glm4MoeForCausalLM"]
_GLM4V = replace(
    _QWEN2_VL,
    architecture="Glm4vForConditionalGeneration",
    decoder=replace(
        _GLM4,
        defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        qkv_bias=True,
        reads_attention_bias=False,
    ),
    roots={"model.language_model.": "lm_head"},
    axes=MultimodalAxes.IN_SECTIONS_OF_A_HALF,
)
_GLM_OCR = replace(
    _GLM4V,
    architecture="GlmOcrForConditionalGeneration",
    decoder=replace(
        _GLM4,
        defaults={
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
        },
        reads_attention_bias=False,
    ),
)
_GLM4V_MOE = replace(
    _GLM4V,
    architecture="Glm4vMoeForConditionalGeneration",
    decoder=replace(
        _GLM4_MOE,
        defaults={**_GLM4_MOE.defaults, "attention_bias": True},
        qk_norm=QkNorm.NONE,
        qk_norm_key=None,
    ),
)

_GEMMA3N = VisionLanguage(
    "Gemma3nForConditionalGeneration",
    decoder=FAMILIES["Gemma3nForCausalLM"],
    roots={"model.language_model.": "lm_head"},
    vision=("model.vision_tower.*", "model.embed_vision.*"),
    others=("model.audio_tower.*", "model.embed_audio.*"),
    has_modal_tokens=True,
)
_GEMMA4 = VisionLanguage(
    "Gemma4ForConditionalGeneration",
    decoder=FAMILIES["Gemma4ForCausalLM"],
    roots={"model.language_model.": "lm_head"},
    vision=("model.vision_tower.*", "model.embed_vision.*"),
    others=("model.audio_tower.*", "model.embed_audio.*"),
    image_sight=ImageSight.WINDOWS,
)

_GEMMA4_UNIFIED = replace(
    _GEMMA4,
    architecture="Gemma4UnifiedForConditionalGeneration",
    decoder=FAMILIES["Gemma4UnifiedForCausalLM"],
    vision=("model.vision_embedder.*", "model.embed_vision.*"),
    others=("model.embed_audio.*",),
    default_sight="vision",
)

_KIMI_K25 = VisionLanguage(
    "KimiK25ForConditionalGeneration",
    decoder=FAMILIES["DeepseekV3ForCausalLM"],
    roots={"language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head"},
    vision=(),
    unserved_vision=("*vision_tower.*", "*mm_projector.*"),
)

_COHERE2_VISION = VisionLanguage(
    "Cohere2VisionForConditionalGeneration",
    decoder=None,
    roots={"language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head"},
    vision=(),
    unserved_vision=("*vision_tower.*", "*multi_modal_projector.*"),
)

_LLAMA4 = VisionLanguage(
    "Llama4ForConditionalGeneration",
    decoder=FAMILIES["Llama4ForCausalLM"],
    roots={"language_model.model.": "language_model.lm_head"},
    vision=(),
    unserved_vision=("vision_model.*", "multi_modal_projector.*"),
)

_MINIMAX_M3 = FAMILIES["MiniMaxM3VLForCausalLM"]
_PUBLISHED_MINIMAX_M3 = VisionLanguage(
    "MiniMaxM3SparseForConditionalGeneration",
    decoder=replace(
        _MINIMAX_M3,
        names=replace(
            _MINIMAX_M3.names,
            gate=("mlp.gate_proj", "mlp.up_proj"),
            block_index=BlockIndexNames(
                queries="self_attn.index_q_proj",
                keys="self_attn.index_k_proj",
                query_norm="self_attn.index_q_norm",
                key_norm="self_attn.index_k_norm",
            ),
            experts=replace(
                MIXTRAL_EXPERTS,
                shared_gate=(
                    "block_sparse_moe.shared_experts.gate_proj",
                    "block_sparse_moe.shared_experts.up_proj",
                ),
                shared_down="block_sparse_moe.shared_experts.down_proj",
                choice_bias="block_sparse_moe.e_score_correction_bias",
                choice_bias_is_row=False,
            ),
        ),
    ),
    roots={"language_model.model.": "language_model.lm_head"},
    vision=(),
    unserved_vision=("vision_tower.*", "multi_modal_projector.*", "patch_merge_mlp.*"),
    others=("mtp.*", "*.mtp.*"),
)

_INKLING = VisionLanguage(
    "InklingForConditionalGeneration",
    decoder=replace(FAMILIES["InklingForCausalLM"], names=PUBLISHED_INKLING),
    roots={"model.llm.": "model.llm.unembed"},
    vision=(),
    unserved_vision=("model.visual.*",),
    others=("model.audio.*", "model.mtp.*"),
)

VISION_LANGUAGE: Mapping[str, VisionLanguage] = {
    model.architecture: model
    for model in (
        replace(
            _LLAVA,
            architecture="Gemma3ForConditionalGeneration",
            decoder=FAMILIES["Gemma3ForCausalLM"],
            image_sight=ImageSight.ALL,
        ),
        _LLAVA,
        replace(_LLAVA, architecture="Mistral3ForConditionalGeneration"),
        _IDEFICS3,
        _INKLING,
        _LLAMA4,
        replace(_IDEFICS3, architecture="SmolVLMForConditionalGeneration"),
        _QWEN2_VL,
        replace(_QWEN2_VL, architecture="Qwen2_5_VLForConditionalGeneration"),
        replace(
            _QWEN2_VL,
            architecture="Qwen3VLForConditionalGeneration",
            decoder=FAMILIES["Qwen3ForCausalLM"],
            axes=MultimodalAxes.INTERLEAVED,
        ),
        replace(
            _QWEN2_VL,
            architecture="Qwen3VLMoeForConditionalGeneration",
            decoder=_QWEN3_VL_MOE,
            axes=MultimodalAxes.INTERLEAVED,
        ),
        _EXAONE4_5,
        _GLM4V,
        replace(_GLM4V, architecture="Glm46VForConditionalGeneration"),
        _GLM4V_MOE,
        _GLM_OCR,
        _GEMMA3N,
        _GEMMA4,
        _GEMMA4_UNIFIED,
        _COHERE2_VISION,
        _KIMI_K25,
        _PUBLISHED_MINIMAX_M3,
        _QWEN3_5,
        replace(
            _QWEN3_5,
            architecture="Qwen3_5MoeForConditionalGeneration",
            decoder=FAMILIES["Qwen3_5MoeForCausalLM"],
        ),
    )
}
"""Vision-language architectures by name, as in config.json"""
