"""GGUF files of small vision-language models with their mmproj files, as llama.cpp writes them.

Names of tensors and keys are those of the package `gguf`; the conversions are those of llama.cpp's
converter.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    dequantize,
    get_tensor_name_map,
    quantize,
)
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import LLAMA3, SHAPE, VOCABULARY, WIDE
from tests.unit.engine.gguf_checkpoints import write_gguf
from tests.unit.engine.vision_checkpoints import IMAGE_TOKEN, VISION_MODELS, VisionModel

__all__ = ["PAIRS", "Pair", "tower_of", "write_mmproj", "write_pair", "write_text"]

_KIND = GGMLQuantizationType
_GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
_QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_GEMMA4 = ("<|image|>", "<|image>", "<image|>")
_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
_TEXT = r"^model\.(language|text)_model\."
"""Beginning of the names of the text model's tensors"""
_LARGEST_NAME = 3
"""Modules of a projector are numbered below it"""


@dataclass(frozen=True, slots=True)
class Pair:
    """A vision-language model that GGUF files can describe."""

    model: VisionModel
    text: Callable[[Any], PreTrainedModel]
    """Makes the text model of its config"""
    tokens: tuple[str, str, str]
    """Texts of the tokens from IMAGE_TOKEN on"""
    projector: str
    """Type of the projector; empty: `keys` writes it, as the converter does for several towers"""
    keys: Callable[[GGUFWriter, Any], None]
    """Writes the keys that only this projector has"""
    architecture: MODEL_ARCH | None = None
    """llama.cpp's architecture of the text model; None = that of its type"""
    merges_heads: bool = False
    """True if the converter reorders the heads of the tower for its own RoPE"""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of parameters' names in published files, by transformers' own"""


def _copied(name: str, **values: Any) -> VisionModel:
    """Return a model with other values of its text config."""
    config = copy.deepcopy(VISION_MODELS[name].config)
    for key, value in values.items():
        setattr(config, key, value)
    return replace(VISION_MODELS[name], config=config)


def _gemma3() -> VisionModel:
    text = Gemma3TextConfig(
        **WIDE | {"tie_word_embeddings": True, "num_hidden_layers": 7},
        query_pre_attn_scalar=32,
        sliding_window=9,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    return _copied("gemma3", text_config=text)


def _ministral() -> VisionModel:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    text = Ministral3Config(**WIDE, rope_parameters=rope)
    return _copied("mistral3", text_config=text)


def _gemma4(name: str) -> VisionModel:
    """Return a model whose images see ahead, as all of this width do, and have up to 280 tokens."""
    model = _copied(name)
    model.config.text_config.use_bidirectional_attention = "vision"
    model.config.text_config.max_position_embeddings = 1024
    processor = copy.deepcopy(model.processor)
    processor.max_soft_tokens = 280
    return replace(model, processor=processor)


def _qwen2_5() -> VisionModel:
    """Return a model whose tower has the window that llama.cpp's format does not state."""
    model = _copied("qwen2.5 vl")
    model.config.vision_config.window_size = 112
    return model


def _gemma3_keys(writer: GGUFWriter, config: Any) -> None:
    writer.add_vision_attention_layernorm_eps(config.vision_config.layer_norm_eps)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(2)


def _qwen_keys(writer: GGUFWriter, config: Any) -> None:
    vision = config.vision_config
    writer.add_vision_attention_layernorm_eps(1e-6)
    size = VISION_MODELS["qwen2 vl"].processor.size
    writer.add_vision_min_pixels(size["shortest_edge"])
    writer.add_vision_max_pixels(size["longest_edge"])
    if hasattr(vision, "fullatt_block_indexes"):
        writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
    if hasattr(vision, "num_position_embeddings"):
        writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
        adds = getattr(vision, "deepstack_visual_indexes", [])
        writer.add_vision_is_deepstack_layers([layer in adds for layer in range(vision.depth)])


def _pixtral_keys(writer: GGUFWriter, config: Any) -> None:
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_use_gelu(True)
    width = config.text_config.hidden_size
    writer.add_tensor("v.token_embd.img_break", np.zeros(width, np.float32))
    if hasattr(config, "spatial_merge_size"):
        writer.add_vision_spatial_merge_size(config.spatial_merge_size)


def _plain(kind: Any, model: Any) -> Callable[[Any], PreTrainedModel]:
    """Return a maker of the text model whose RoPE has one axis."""

    def make(text: Any) -> PreTrainedModel:
        values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
        made: PreTrainedModel = model(kind(**values))
        return made

    return make


def _idefics3_keys(writer: GGUFWriter, config: Any) -> None:
    writer.add_vision_attention_layernorm_eps(config.vision_config.layer_norm_eps)
    writer.add_vision_projector_scale_factor(config.scale_factor)
    writer.add_vision_use_gelu(True)
    size = VISION_MODELS["smolvlm"].processor.size
    writer.add_vision_preproc_image_size(size["longest_edge"])


def _gemma4_keys(writer: GGUFWriter, config: Any) -> None:
    writer.add_clip_vision_projector_type("gemma4v")
    writer.add_vision_attention_layernorm_eps(config.vision_config.rms_norm_eps)
    writer.add_vision_projector_scale_factor(config.vision_config.pooling_kernel_size)
    for sound in ("a.blk.0.attn_q.weight", "mm.a.input_projection.weight"):
        writer.add_tensor(sound, np.zeros((4, 4), np.float32))


_SIGLIP = {"vision_tower.": "vision_tower.vision_model."}
_GEMMA4_PREFIXES = {
    r"vision_tower\.encoder\.": "vision_model.model.",
    r"vision_tower\.": "model.vision_tower.",
    r"embed_vision\.": "model.embed_vision.",
}
_QWEN2 = _plain(Qwen2Config, Qwen2ForCausalLM)
PAIRS: dict[str, Pair] = {
    "gemma3": Pair(_gemma3(), Gemma3ForCausalLM, _GEMMA, "gemma3", _gemma3_keys, prefixes=_SIGLIP),
    "qwen2 vl": Pair(
        _copied("qwen2 vl"), _QWEN2, _QWEN, "qwen2vl_merger", _qwen_keys, MODEL_ARCH.QWEN2VL
    ),
    "qwen2.5 vl": Pair(
        _qwen2_5(), _QWEN2, _QWEN, "qwen2.5vl_merger", _qwen_keys, MODEL_ARCH.QWEN2VL
    ),
    "qwen3 vl": Pair(
        _copied("qwen3 vl"),
        _plain(Qwen3Config, Qwen3ForCausalLM),
        _QWEN,
        "qwen3vl_merger",
        _qwen_keys,
        MODEL_ARCH.QWEN3VL,
    ),
    "qwen3 vl moe": Pair(
        _copied("qwen3 vl moe"),
        _plain(Qwen3MoeConfig, Qwen3MoeForCausalLM),
        _QWEN,
        "qwen3vl_merger",
        _qwen_keys,
        MODEL_ARCH.QWEN3VLMOE,
    ),
    "qwen3.5 vl": Pair(
        _copied("qwen3.5 vl"), Qwen3_5ForCausalLM, _QWEN, "qwen3vl_merger", _qwen_keys
    ),
    "pixtral": Pair(
        _copied("llava, pixtral"),
        MistralForCausalLM,
        _PIXTRAL,
        "pixtral",
        _pixtral_keys,
        merges_heads=True,
    ),
    "smolvlm": Pair(
        _copied("smolvlm", text_config=LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
        LlamaForCausalLM,
        ("<image>", "<fake_token_around_image>", "<global-img>"),
        "idefics3",
        _idefics3_keys,
        prefixes={"vision_model.": "model.vision_model.", "connector.": "model.connector."},
    ),
    "gemma4": Pair(
        _gemma4("gemma4, images see ahead"),
        Gemma4ForCausalLM,
        _GEMMA4,
        "",
        _gemma4_keys,
        prefixes=_GEMMA4_PREFIXES,
    ),
    "gemma4, clipped": Pair(
        _gemma4("gemma4"),
        Gemma4ForCausalLM,
        _GEMMA4,
        "",
        _gemma4_keys,
        prefixes=_GEMMA4_PREFIXES,
    ),
    "mistral3": Pair(
        _ministral(),
        Ministral3ForCausalLM,
        _PIXTRAL,
        "pixtral",
        _pixtral_keys,
        merges_heads=True,
    ),
}


def write_pair(
    directory: Path, name: str, kind: GGMLQuantizationType = _KIND.F32
) -> PreTrainedModel:
    """Write model.gguf and mmproj-model.gguf; return the model as transformers runs it.

    kind: type of the tower's matrices, whose rounded weights the returned model has.
    """
    pair = PAIRS[name]
    directory.mkdir(exist_ok=True)
    whole = make_checkpoint(directory, pair.model.config)
    for file in directory.iterdir():
        file.unlink()
    tower = tower_of(whole)
    for tensor in tower.values():
        if _is_matrix(tensor, kind):
            codes = quantize(np.ascontiguousarray(tensor.numpy()), kind)
            tensor.copy_(torch.from_numpy(dequantize(codes, kind).reshape(tensor.shape)))
    write_text(directory / "model.gguf", pair, whole)
    write_mmproj(directory / "mmproj-model.gguf", pair, tower, kind)
    return whole


def tower_of(whole: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model's tower and projector."""
    state = whole.state_dict().items()
    return {name.removeprefix("model."): tensor for name, tensor in state if _is_of_tower(name)}


def write_text(
    path: Path, pair: Pair, whole: PreTrainedModel, tokens: Sequence[str] | None = None
) -> None:
    """Write the file of the text model. tokens: texts of its tokens from IMAGE_TOKEN on."""
    text = pair.text(whole.config.text_config)
    state = {
        re.sub(_TEXT, "model.", name): tensor
        for name, tensor in whole.state_dict().items()
        if not _is_of_tower(name)
    }
    text.load_state_dict(state)
    rope = whole.config.text_config.rope_parameters

    def write_more(writer: GGUFWriter) -> None:
        texts = [*(f"<{number}>" for number in range(VOCABULARY - 3)), "a", "b", "ab"]
        texts[IMAGE_TOKEN : IMAGE_TOKEN + 3] = pair.tokens if tokens is None else tokens
        writer.add_token_list(texts)
        writer.add_token_types([TokenType.USER_DEFINED] * VOCABULARY)
        writer.add_pad_token_id(text.config.pad_token_id or 0)
        if "mrope_section" in rope:
            writer.add_rope_dimension_sections([*rope["mrope_section"], 0])

    write_gguf(path, text, further=write_more, architecture=pair.architecture)


def write_mmproj(
    path: Path,
    pair: Pair,
    state: Mapping[str, Tensor],
    kind: GGMLQuantizationType = _KIND.F32,
    *,
    further: Callable[[GGUFWriter], None] = lambda _: None,
) -> None:
    """Write an mmproj file. further: writes more, or other values."""
    config = pair.model.config
    vision = config.vision_config
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", 0)  # Qwen 2-VL has a wrong value or none
    writer = GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    if pair.projector:
        writer.add_clip_projector_type(pair.projector)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    writer.add_vision_image_size(getattr(vision, "image_size", 560))
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(width)
    writer.add_vision_feed_forward_length(inner)
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(getattr(vision, "num_heads", None) or vision.num_attention_heads)
    writer.add_vision_image_mean([*pair.model.processor.image_mean])
    writer.add_vision_image_std([*pair.model.processor.image_std])
    pair.keys(writer, config)
    further(writer)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, max(layers, _LARGEST_NAME))
    for name, tensor in state.items():
        for part, content in _split(name, tensor, pair):
            numbers = np.atleast_1d(np.ascontiguousarray(content.float().numpy()))
            stored = _stored_name(names, part, pair)
            if _is_matrix(content, kind):
                writer.add_tensor(stored, quantize(numbers, kind), raw_dtype=kind)
            else:
                writer.add_tensor(stored, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_matrix(tensor: Tensor, kind: GGMLQuantizationType) -> bool:
    block, _ = GGML_QUANT_SIZES[kind]
    return kind is not _KIND.F32 and tensor.ndim == 2 and tensor.shape[-1] % block == 0


def _is_of_tower(name: str) -> bool:
    return not (name.startswith("lm_head") or re.match(_TEXT, name))


def _split(name: str, tensor: Tensor, pair: Pair) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the converter makes of one."""
    if ".attn.qkv." in name and pair.projector != "qwen3vl_merger":
        for part, content in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("qkv", part), content
    elif name.endswith("patch_embed.proj.weight"):
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif pair.merges_heads and re.search(r"[qk]_proj", name):
        heads = pair.model.config.vision_config.num_attention_heads
        apart = tensor.view(heads, 2, -1, *tensor.shape[1:])
        yield name, apart.transpose(1, 2).reshape(tensor.shape)
    elif name.endswith("patch_embedder.input_proj.weight"):
        edge = pair.model.config.vision_config.patch_size
        yield name, tensor.view(-1, edge, edge, 3).permute(0, 3, 1, 2)
    elif name.endswith("soft_emb_norm.weight"):
        yield name, tensor + 1
    else:
        yield name, tensor


def _stored_name(names: Any, name: str, pair: Pair) -> str:
    """Return llama.cpp's name of a parameter."""
    if name.startswith("v."):
        return name
    if pair.projector == "qwen3vl_merger" and "merger" in name:
        return _merger_name(name, pair)
    for ours, published in pair.prefixes.items():
        name = re.sub(f"^{ours}", published, name)
    name = name.replace(".linear.weight", ".weight")
    if name.endswith("projection_weight"):
        name = name.replace("_weight", ".weight")
    if name.endswith("position_embedding_table"):
        name = f"{name}.weight"
    found = names.get_name(name, try_suffixes=_SUFFIXES)
    assert found is not None, name
    return str(found)


def _merger_name(name: str, pair: Pair) -> str:
    """Return the name of a tensor of Qwen 3-VL's mergers, which bear the numbers of layers."""
    parts = name.split(".")
    if parts[1] == "merger":
        module = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[parts[2]]
        return f"{module}.{parts[3]}"
    layer = pair.model.config.vision_config.deepstack_visual_indexes[int(parts[2])]
    return f"v.deepstack.{layer}.{parts[3].removeprefix('linear_')}.{parts[4]}"
