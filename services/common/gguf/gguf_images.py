"""Config and image processor of a vision-language model in a GGUF file with its mmproj file.

An mmproj file of llama.cpp holds the vision tower and the projector: the architecture `clip`, keys
below `clip.vision`, and tensors whose names begin with `v.` and `mm.`. Values that the file lacks
are those of the published models.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.gguf.gguf_config import MARK
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.json_values import Json

__all__ = ["ImageModel", "read_image_model"]

_ARCHITECTURE = "clip"
_VISION = "clip.vision"
_TOKENS, _KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_CONTROL = 3
"""Number of special tokens in the list of kinds"""
_FRAMES = 2
"""Frames of a patch in Qwen's towers, which take an image as two equal frames"""
_QWEN2_PIXELS = (56 * 56, 16_384 * 28 * 28)
_QWEN3_PIXELS = (256 * 256, 4096 * 4096)
"""Least and most pixels of an image in the published models"""
_QWEN_WINDOW = 112
"""Edge in pixels of a window of Qwen 2.5-VL's tower"""
_ROPE_BASE = 10000.0
_UNUSED = "<unused"


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A vision-language model, as the files of a checkpoint in Hugging Face form describe it."""

    config: dict[str, Json]
    """Content of config.json"""
    images: dict[str, Json]
    """Content of preprocessor_config.json"""
    processor: dict[str, Json]
    """Content of processor_config.json"""
    text: GgufFile
    """The text model's file, in which the tokens of an image are special tokens"""
    mmproj: Path


@dataclass(frozen=True, slots=True)
class _Projector:
    """A type of projector."""

    architectures: Mapping[str, str]
    """Vision-language architectures by llama.cpp's name of the text model"""
    output: str
    """Tensor whose outputs are as wide as the text model"""
    tokens: Mapping[str, str]
    """Tokens of an image by their keys in config.json"""
    read: Callable[["_Pair"], ImageModel]
    outputs_last: bool = False
    """True if the tensor's last dimension is that of its outputs"""


@dataclass(frozen=True, slots=True)
class _Pair:
    """The files of a model."""

    text: GgufFile
    mmproj: GgufFile
    values: Mapping[str, Json]
    """Content of the text model's config.json"""
    architecture: str
    ids: Mapping[str, Json]
    """Ids of the tokens of an image by their keys in config.json"""

    def model(
        self,
        kind: str,
        text_kind: str,
        vision: dict[str, Json],
        images: dict[str, Json],
        processor: dict[str, Json],
        **further: Json,
    ) -> ImageModel:
        """Return the model. kind, text_kind: model_type of the whole and of its text part."""
        inner = {key: value for key, value in self.values.items() if key != MARK}
        mark = self.values[MARK]
        assert isinstance(mark, dict)
        names = inner.pop("architectures")
        assert isinstance(names, list)
        config: dict[str, Json] = {
            "architectures": [self.architecture],
            "model_type": kind,
            "text_config": {**inner, "model_type": text_kind},
            "vision_config": vision,
            "tie_word_embeddings": inner.get("tie_word_embeddings", False),
            **self.ids,
            **further,
            MARK: {**mark, "decoder": names[0]},
        }
        normal: dict[str, Json] = {
            "image_mean": [*self._three("image_mean")],
            "image_std": [*self._three("image_std")],
        }
        mmproj = self.mmproj.path
        return ImageModel(config, {**images, **normal}, processor, self.text, mmproj)

    @property
    def width(self) -> int:
        """Width of the text model."""
        return self.text.count(self.text.own("embedding_length"))

    def with_sections(self) -> "_Pair":
        """Return the pair with the sections of multimodal RoPE in the text model's config.json."""
        key = self.text.own("rope.dimension_sections")
        sections = [each for each in self.text.integers(key, 3) if each]
        scaling = self.values["rope_scaling"]
        assert isinstance(scaling, dict)
        scaled: dict[str, Json] = {**scaling, "mrope_section": [*sections]}
        return replace(self, values={**self.values, "rope_scaling": scaled})

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive number of the tower. Raises GgufError."""
        return self.mmproj.count(f"{_VISION}.{key}", default)

    def tower(self) -> dict[str, Json]:
        """Return the sizes that all towers have."""
        width = self.count("embedding_length")
        return {
            "hidden_size": width,
            "num_attention_heads": self.mmproj.count(f"{_VISION}.attention.head_count", most=width),
            "num_hidden_layers": self.count("block_count"),
            "intermediate_size": self.feed_forward(width),
            "patch_size": self.count("patch_size"),
        }

    def feed_forward(self, width: int) -> int:
        """Return the width of a feed-forward layer, which the key of Qwen 2-VL's files is not."""
        name = "v.blk.0.ffn_up.weight"
        shape = self.mmproj.tensors[name].shape if name in self.mmproj.tensors else ()
        if len(shape) != 2:
            raise GgufError(f"{self.mmproj.path} is damaged: it has no matrix {name}.")
        return shape[1] if shape[0] == width else shape[0]  # old files have up and down exchanged

    def rows(self, name: str) -> int:
        """Return the first dimension of a tensor. Raises GgufError if it is missing."""
        if name not in self.mmproj.tensors:
            raise GgufError(f"{self.mmproj.path} is damaged: it has no {name}.")
        return self.mmproj.tensors[name].shape[0]

    def _three(self, key: str) -> list[float]:
        numbers = self.mmproj.numbers(f"{_VISION}.{key}")
        if len(numbers) != 3 or (key == "image_std" and min(numbers) <= 0):
            raise GgufError(f"{self.mmproj.path}: {_VISION}.{key} must be 3 numbers.")
        return numbers


def read_image_model(text: GgufFile, values: Mapping[str, Json], mmproj: Path) -> ImageModel:
    """Return the model of a text model's file and an mmproj file.

    values: content of config.json for the text model alone. Raises GgufError for an mmproj file
    that is damaged, that belongs to another model, or whose projector is not supported.
    """
    file = GgufFile(mmproj.absolute())
    kind = _projector_type(file)
    projector = _PROJECTORS[kind]
    if text.architecture not in projector.architectures:
        raise GgufError(
            f"{mmproj} belongs to another model: its projector {kind} goes with the architectures "
            f"{', '.join(projector.architectures)}, and {text.path.name} has {text.architecture}."
        )
    _require_width(text, file, projector)
    changed = _with_image_tokens(text, [*projector.tokens.values()])
    found = changed.texts(_TOKENS)
    ids: dict[str, Json] = {key: found.index(each) for key, each in projector.tokens.items()}
    architecture = projector.architectures[text.architecture]
    return projector.read(_Pair(changed, file, values, architecture, ids))


def _projector_type(file: GgufFile) -> str:
    """Return the type of the projector. Raises GgufError unless it is supported."""
    if file.architecture != _ARCHITECTURE:
        raise GgufError(
            f"{file.path} is no mmproj file: its architecture is {file.architecture}, not "
            f"{_ARCHITECTURE}."
        )
    key = "clip.projector_type"
    kind = file.text(key if key in file.metadata else f"{_VISION}.projector_type", "mlp")
    if kind not in _PROJECTORS:
        raise GgufError(
            f"{file.path}: the projector type {kind} is not supported. Supported: "
            f"{', '.join(_PROJECTORS)}."
        )
    return kind


def _require_width(text: GgufFile, file: GgufFile, projector: _Projector) -> None:
    """Raise GgufError unless the projector's outputs are as wide as the text model."""
    tensor = file.tensors.get(projector.output)
    if tensor is None:
        raise GgufError(f"{file.path} is damaged: it has no {projector.output}.")
    made = tensor.shape[-1 if projector.outputs_last else 0]
    width = text.count(text.own("embedding_length"))
    if made != width:
        raise GgufError(
            f"{file.path} belongs to another model: its projector makes {made} numbers of a token, "
            f"and {text.path.name} takes {width}."
        )


def _with_image_tokens(text: GgufFile, wanted: list[str]) -> GgufFile:
    """Return the text model's file with the tokens of an image as special tokens.

    Files of Gemma 3 may end before its <image_soft_token>, which stands for a part of an image in
    prompts; their last unused token becomes it. Raises GgufError if another token is missing.
    """
    tokens = text.texts(_TOKENS)
    kinds = [*text.numbers(_KINDS)] or [1] * len(tokens)
    places = {token: index for index, token in enumerate(tokens) if token in wanted}
    for token in wanted:
        if token not in places:
            place = _unused(tokens) if token == _SOFT_TOKEN else None
            if place is None:
                raise GgufError(f"{text.path} has no token {token}, which stands for images.")
            places[token] = place
            tokens = [*tokens[:place], token, *tokens[place + 1 :]]
        if places[token] < len(kinds):
            kinds[places[token]] = _CONTROL
    changed = copy.copy(text)
    changed.metadata = {**text.metadata, _TOKENS: tokens, _KINDS: [int(each) for each in kinds]}
    return changed


def _unused(tokens: list[str]) -> int | None:
    """Return the number of the last unused token; None if there is none."""
    numbers = range(len(tokens) - 1, -1, -1)
    return next((number for number in numbers if tokens[number].startswith(_UNUSED)), None)


def _read_gemma3(pair: _Pair) -> ImageModel:
    tower, edge = pair.tower(), pair.count("image_size")
    merged = pair.count("projector.scale_factor", 4)
    per_side = edge // pair.count("patch_size") // merged
    if per_side < 1:
        raise GgufError(f"{pair.mmproj.path}: {_VISION}.image_size is below the edge of a token.")
    epsilon = pair.mmproj.positive(f"{_VISION}.attention.layer_norm_epsilon", 1e-6)
    vision: dict[str, Json] = {
        **tower,
        "model_type": "siglip_vision_model",
        "image_size": edge,
        "layer_norm_eps": epsilon,
        "vision_use_head": False,
    }
    images: dict[str, Json] = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": edge, "width": edge},
    }
    run = per_side**2
    processor: dict[str, Json] = {"image_seq_length": run}
    return pair.model("gemma3", "gemma3_text", vision, images, processor, mm_tokens_per_image=run)


def _read_qwen2(pair: _Pair) -> ImageModel:
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


def _read_qwen2_5(pair: _Pair) -> ImageModel:
    tower = pair.tower()
    layers, pattern = pair.count("block_count"), pair.count("n_wa_pattern")
    vision: dict[str, Json] = {
        **_qwen_tower(tower),
        "out_hidden_size": pair.width,
        "window_size": pair.count("window_size", _QWEN_WINDOW),
        "fullatt_block_indexes": [*range(pattern - 1, layers, pattern)],
    }
    return _read_qwen(pair, "qwen2_5_vl", "qwen2_5_vl_text", vision, _QWEN2_PIXELS)


def _read_qwen3(pair: _Pair) -> ImageModel:
    vision: dict[str, Json] = {
        **_qwen_tower(pair.tower()),
        "out_hidden_size": pair.width,
        "num_position_embeddings": pair.rows("v.position_embd.weight"),
    }
    kind, text_kind = _QWEN3_KINDS[pair.text.architecture]
    if pair.text.architecture.startswith("qwen3vl"):
        layers = pair.mmproj.metadata.get(f"{_VISION}.is_deepstack_layers", [])
        adds = layers if isinstance(layers, list) else []
        vision["deepstack_visual_indexes"] = [layer for layer, is_one in enumerate(adds) if is_one]
    return _read_qwen(pair, kind, text_kind, vision, _QWEN3_PIXELS)


def _qwen_tower(tower: dict[str, Json]) -> dict[str, Json]:
    """Return the sizes of a tower under Qwen's names."""
    names = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
    return {names.get(key, key): value for key, value in tower.items()}


def _read_qwen(
    pair: _Pair, kind: str, text_kind: str, vision: dict[str, Json], pixels: tuple[int, int]
) -> ImageModel:
    """Return a model of Qwen. pixels: least and most of an image in the published model."""
    merged = pair.count("spatial_merge_size", 2)
    least, most = (
        pair.count(f"image_{end}_pixels", default)
        for end, default in zip(("min", "max"), pixels, strict=True)
    )
    images: dict[str, Json] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": least, "longest_edge": most},
        "patch_size": pair.count("patch_size"),
        "merge_size": merged,
        "temporal_patch_size": _FRAMES,
    }
    own: dict[str, Json] = {"spatial_merge_size": merged, "temporal_patch_size": _FRAMES}
    return pair.with_sections().model(kind, text_kind, vision | own, images, {})


def _read_pixtral(pair: _Pair) -> ImageModel:
    patch, edge = pair.count("patch_size"), pair.count("image_size")
    tower = pair.tower()
    width, heads = tower["hidden_size"], tower["num_attention_heads"]
    assert isinstance(width, int)
    assert isinstance(heads, int)
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


_SOFT_TOKEN = "<image_soft_token>"
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
_PROJECTORS: Mapping[str, _Projector] = {
    "gemma3": _Projector(
        {"gemma3": "Gemma3ForConditionalGeneration"},
        "mm.input_projection.weight",
        {
            "image_token_index": _SOFT_TOKEN,
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        _read_gemma3,
        outputs_last=True,
    ),
    "qwen2vl_merger": _Projector(
        {"qwen2vl": "Qwen2VLForConditionalGeneration"},
        "mm.2.weight",
        _QWEN_TOKENS,
        _read_qwen2,
    ),
    "qwen2.5vl_merger": _Projector(
        {"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
        "mm.2.weight",
        _QWEN_TOKENS,
        _read_qwen2_5,
    ),
    "qwen3vl_merger": _Projector(
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
    "pixtral": _Projector(
        dict.fromkeys(_PIXTRAL_TEXTS, "Mistral3ForConditionalGeneration"),
        "mm.2.weight",
        {"image_token_index": "[IMG]"},
        _read_pixtral,
    ),
}
"""Supported projectors by type"""
