"""Projectors of llama.cpp: one row each, and the config and image processor of its models.

Values that a file lacks are those of the published models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt

from services.common.contract import MAX_IMAGE_PIXELS
from services.common.gguf.gguf_file import GgufError
from services.common.gguf.gguf_image_pair import VISION, ImageModel, ImagePair
from services.common.json_values import Json

__all__ = ["PROJECTORS", "SOFT_TOKEN", "Projector"]

SOFT_TOKEN = "<image_soft_token>"
"""Token of Gemma 3 that stands for a part of an image"""
_FRAMES = 2
"""Frames of a patch in Qwen's towers, which take an image as two equal frames"""
_QWEN2_PIXELS = (56 * 56, 16_384 * 28 * 28)
_QWEN3_PIXELS = (256 * 256, 4096 * 4096)
"""Least and most pixels of an image in the published models"""
_QWEN_WINDOW = 112
"""Edge in pixels of a window of Qwen 2.5-VL's tower"""
_ROPE_BASE = 10000.0
_ROPE_PART = 4
"""Numbers of a head that RoPE of two axes rotates together"""
_TILES, _MOST_TILES = 4, 16
"""Tiles along an edge of an image of SmolVLM: those of the published models, and the most that a
file may ask for. Each image is enlarged to them"""
_GEMMA4_TOKENS = 280
"""Most tokens of an image of Gemma 4"""
_CAUSAL_WIDTHS = (1536, 2560)
"""Widths of Gemma 4 E2B and E4B, in which an image's tokens don't see later ones. The files don't
state it; llama.cpp goes by the width, too"""
_MATRIX, _AXES = 2, 3
"""Dimensions of a matrix, and of Gemma 4's positions by axis"""
_MERGER = "mm.patch_merger.weight"
_QWEN3_KINDS = {
    "qwen3vl": ("qwen3_vl", "qwen3_vl_text"),
    "qwen3vlmoe": ("qwen3_vl_moe", "qwen3_vl_moe_text"),
    "qwen35": ("qwen3_5", "qwen3_5_text"),
    "qwen35moe": ("qwen3_5_moe", "qwen3_5_moe_text"),
}
"""model_type of the whole and of its text part, by llama.cpp's name of the text model"""
_PIXTRAL_TEXTS = {"llama": "llama", "mistral3": "ministral3"}
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


@dataclass(frozen=True, slots=True)
class Projector:
    """A type of projector."""

    architectures: Mapping[str, str]
    """Vision-language architectures by llama.cpp's name of the text model"""
    output: str
    """Tensor whose outputs are as wide as the text model"""
    tokens: Mapping[str, str]
    """Tokens of an image by their keys in config.json"""
    read: Callable[[ImagePair], ImageModel]
    marks: tuple[str, ...] = ()
    """Further special tokens of an image"""
    outputs_last: bool = False
    """True if the tensor's last dimension is that of its outputs"""


def _read_gemma3(pair: ImagePair) -> ImageModel:
    vision, edge = _siglip(pair, "siglip_vision_model"), pair.count("image_size")
    merged = pair.count("projector.scale_factor", 4)
    per_side = edge // pair.count("patch_size") // merged
    if per_side < 1:
        raise GgufError(f"{pair.mmproj.path}: {VISION}.image_size is below the edge of a token.")
    vision["vision_use_head"] = False
    images: dict[str, Json] = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": edge, "width": edge},
    }
    run = per_side**2
    processor: dict[str, Json] = {"image_seq_length": run}
    return pair.model("gemma3", "gemma3_text", vision, images, processor, mm_tokens_per_image=run)


def _siglip(pair: ImagePair, kind: str) -> dict[str, Json]:
    """Return the sizes of a tower of SigLIP. kind: its model_type."""
    edge, positions = pair.count("image_size"), pair.shape("v.position_embd.weight", _MATRIX)[0]
    if (edge // pair.count("patch_size")) ** 2 != positions:
        raise GgufError(
            f"{pair.mmproj.path} is damaged: it has {positions} positions, and {VISION}.image_size "
            f"is {edge}."
        )
    return {
        **pair.tower(),
        "model_type": kind,
        "image_size": edge,
        "layer_norm_eps": pair.mmproj.positive(f"{VISION}.attention.layer_norm_epsilon", 1e-6),
    }


def _read_qwen2(pair: ImagePair) -> ImageModel:
    tower = pair.tower()
    width, inner = tower.pop("hidden_size"), tower.pop("intermediate_size")
    assert isinstance(width, int)
    assert isinstance(inner, int)
    if inner % width:
        raise GgufError(f"{pair.mmproj.path}: the layers' width {inner} is no multiple of {width}.")
    vision: dict[str, Json] = {
        **_qwen_tower(tower),
        "embed_dim": width,
        "hidden_size": pair.width,
        "mlp_ratio": inner // width,
    }
    return _read_qwen(pair, "qwen2_vl", "qwen2_vl_text", vision, _QWEN2_PIXELS)


def _read_qwen2_5(pair: ImagePair) -> ImageModel:
    tower = pair.tower()
    layers, pattern = tower["num_hidden_layers"], pair.count("n_wa_pattern")
    assert isinstance(layers, int)
    vision: dict[str, Json] = {
        **_qwen_tower(tower),
        "out_hidden_size": pair.width,
        "window_size": pair.count("window_size", _QWEN_WINDOW),
        "fullatt_block_indexes": [*range(pattern - 1, layers, pattern)],
    }
    return _read_qwen(pair, "qwen2_5_vl", "qwen2_5_vl_text", vision, _QWEN2_PIXELS)


def _read_qwen3(pair: ImagePair) -> ImageModel:
    vision: dict[str, Json] = {
        **_qwen_tower(pair.tower()),
        "out_hidden_size": pair.width,
        "num_position_embeddings": pair.shape("v.position_embd.weight", _MATRIX)[0],
    }
    kind, text_kind = _QWEN3_KINDS[pair.text.architecture]
    if pair.text.architecture.startswith("qwen3vl"):
        layers = pair.mmproj.metadata.get(f"{VISION}.is_deepstack_layers", [])
        adds = layers if isinstance(layers, list) else []
        vision["deepstack_visual_indexes"] = [layer for layer, is_one in enumerate(adds) if is_one]
    return _read_qwen(pair, kind, text_kind, vision, _QWEN3_PIXELS)


def _qwen_tower(tower: dict[str, Json]) -> dict[str, Json]:
    """Return the sizes of a tower under Qwen's names."""
    names = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
    return {names.get(key, key): value for key, value in tower.items()}


def _read_qwen(
    pair: ImagePair, kind: str, text_kind: str, vision: dict[str, Json], pixels: tuple[int, int]
) -> ImageModel:
    """Return a model of Qwen. pixels: least and most of an image in the published model."""
    merged = pair.count("spatial_merge_size", 2)
    most = pair.count("image_max_pixels", pixels[1])
    bound = min(most, MAX_IMAGE_PIXELS)  # images are enlarged to it
    least = pair.count("image_min_pixels", min(pixels[0], bound), most=bound)
    images: dict[str, Json] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": least, "longest_edge": most},
        "patch_size": pair.count("patch_size"),
        "merge_size": merged,
        "temporal_patch_size": _FRAMES,
    }
    own: dict[str, Json] = {"spatial_merge_size": merged, "temporal_patch_size": _FRAMES}
    return pair.with_sections().model(kind, text_kind, vision | own, images, {})


def _read_pixtral(pair: ImagePair) -> ImageModel:
    patch = pair.count("patch_size")
    edge, tower = pair.count("image_size", least=patch), pair.tower()
    width, heads = tower["hidden_size"], tower["num_attention_heads"]
    assert isinstance(width, int)
    assert isinstance(heads, int)
    if width // heads % _ROPE_PART:
        raise GgufError(
            f"{pair.mmproj.path}: a head has {width // heads} numbers, and its rotation needs "
            f"a multiple of {_ROPE_PART}."
        )
    base = pair.mmproj.positive("clip.rope.freq_base", _ROPE_BASE)
    uses_silu = pair.mmproj.flag("clip.use_silu", False)
    vision: dict[str, Json] = {
        **tower,
        "model_type": "pixtral",
        "image_size": edge,
        "head_dim": width // heads,
        "hidden_act": "silu" if uses_silu else "gelu",
        "rope_parameters": {"rope_theta": base, "rope_type": "axial"},
    }
    images: dict[str, Json] = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": edge},
        "patch_size": {"height": patch, "width": patch},
    }
    processor: dict[str, Json] = {"patch_size": patch}
    further: dict[str, Json] = {
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in pair.mmproj.tensors,
    }
    text_kind = _PIXTRAL_TEXTS[pair.text.architecture]
    if _MERGER not in pair.mmproj.tensors:
        further["vision_feature_select_strategy"] = "full"
        whole = replace(pair, architecture="LlavaForConditionalGeneration")
        return whole.model("llava", text_kind, vision, images, processor, **further)
    merged = pair.count("spatial_merge_size", 2)
    further["spatial_merge_size"] = merged
    processor["spatial_merge_size"] = merged
    return pair.model("mistral3", text_kind, vision, images, processor, **further)


def _read_idefics3(pair: ImagePair) -> ImageModel:
    edge, patch = pair.count("image_size"), pair.count("patch_size")
    merged = pair.count("projector.scale_factor", 2)
    longest = pair.count("preproc_image_size", _TILES * edge, most=_MOST_TILES * edge)
    vision = _siglip(pair, "smolvlm_vision")
    images: dict[str, Json] = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": edge},
    }
    processor: dict[str, Json] = {"image_seq_len": (edge // patch) ** 2 // merged**2}
    return pair.model("smolvlm", "llama", vision, images, processor, scale_factor=merged)


def _read_gemma4(pair: ImagePair) -> ImageModel:
    tower, patch = pair.tower(), pair.count("patch_size")
    positions = pair.shape("v.position_embd.weight", _AXES)[1]
    side = isqrt(_GEMMA4_TOKENS)  # of a square image, whose patches have positions
    most = min(isqrt(MAX_IMAGE_PIXELS) // side // patch, positions // side)
    pooled = pair.count("projector.scale_factor", 3, most=most)
    (head_dim,) = pair.shape("v.blk.0.attn_k_norm.weight", 1)
    vision: dict[str, Json] = {
        **tower,
        "model_type": "gemma4_vision",
        "head_dim": head_dim,
        "num_key_value_heads": pair.shape("v.blk.0.attn_k.weight", _MATRIX)[0] // head_dim,
        "pooling_kernel_size": pooled,
        "position_embedding_size": positions,
        "rms_norm_eps": pair.mmproj.positive(f"{VISION}.attention.layer_norm_epsilon", 1e-6),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in pair.mmproj.tensors,
        "standardize": "v.std_bias" in pair.mmproj.tensors,
    }
    images: dict[str, Json] = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": patch,
        "pooling_kernel_size": pooled,
        "max_soft_tokens": _GEMMA4_TOKENS,
    }
    sight = "none" if pair.width in _CAUSAL_WIDTHS else "vision"
    further: dict[str, Json] = {
        "use_bidirectional_attention": sight,
        "pad_token_id": pair.text.count("tokenizer.ggml.padding_token_id", 0, least=0),
    }
    whole = replace(pair, values={**pair.values, **further})
    return whole.model("gemma4", "gemma4_text", vision, images, {})


PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector(
        {"gemma3": "Gemma3ForConditionalGeneration"},
        "mm.input_projection.weight",
        {
            "image_token_index": SOFT_TOKEN,
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        _read_gemma3,
        outputs_last=True,
    ),
    "qwen2vl_merger": Projector(
        {"qwen2vl": "Qwen2VLForConditionalGeneration"},
        "mm.2.weight",
        _QWEN_TOKENS,
        _read_qwen2,
    ),
    "qwen2.5vl_merger": Projector(
        {"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
        "mm.2.weight",
        _QWEN_TOKENS,
        _read_qwen2_5,
    ),
    "qwen3vl_merger": Projector(
        {
            "qwen3vl": "Qwen3VLForConditionalGeneration",
            "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
            "qwen35": "Qwen3_5ForConditionalGeneration",
            "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
        },
        "mm.2.weight",
        _QWEN_TOKENS,
        _read_qwen3,
    ),
    "pixtral": Projector(
        dict.fromkeys(_PIXTRAL_TEXTS, "Mistral3ForConditionalGeneration"),
        "mm.2.weight",
        {"image_token_index": "[IMG]"},
        _read_pixtral,
        marks=("[IMG_BREAK]", "[IMG_END]"),
    ),
    "idefics3": Projector(
        {"llama": "SmolVLMForConditionalGeneration"},
        "mm.model.fc.weight",
        {"image_token_id": "<image>"},
        _read_idefics3,
        marks=("<fake_token_around_image>",),
    ),
    "gemma4v": Projector(
        {"gemma4": "Gemma4ForConditionalGeneration"},
        "mm.input_projection.weight",
        {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
        _read_gemma4,
    ),
}
"""Supported projectors by type"""
