"""Names of the tensors in mmproj files, by the names of transformers' parameters.

The names in the files are those of llama.cpp (`gguf-py/gguf/tensor_mapping.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MmprojNames", "Place", "names_of"]

_LAYER = re.compile(r"\.(\d+)\.(?=.*\.)")
"""Number of a layer in a name. One before the last part is that of a projector's module"""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor of an mmproj file in a parameter of transformers."""

    parameter: str
    part: int = 0
    """Number of the tensor among those that the parameter joins"""


@dataclass(frozen=True, slots=True)
class MmprojNames:
    """Names and conversions of one vision-language architecture."""

    modules: Mapping[str, str]
    """Modules or parameters of transformers by the names in the files; * stands for the number of a
    layer"""
    joined: Mapping[str, tuple[str, int]]
    """Modules whose tensors are parts of a module of transformers, as (module, part)"""
    ignored: tuple[str, ...] = ()
    """Tensors that the tower does not need"""
    norms: tuple[str, ...] = ()
    """Parameters to which the converter has added 1"""
    interleaved: tuple[str, ...] = ()
    """Modules whose heads the converter has reordered for RoPE of neighbouring numbers"""
    flattened: tuple[str, ...] = ()
    """Matrices over patches that the converter has made convolutions, with the colours first"""

    def place(self, name: str) -> Place | None:
        """Return the place of a tensor; None if the architecture has no such tensor."""
        layer = _LAYER.search(name)
        number = "" if layer is None else layer[1]
        pattern = name if layer is None else f"{name[: layer.start(1)]}*{name[layer.end(1) :]}"
        stem, _, suffix = pattern.rpartition(".")
        for known, end in ((pattern, ""), (stem, f".{suffix}")):
            if known in self.modules:
                return Place(f"{self.modules[known].replace('*', number)}{end}")
            if known in self.joined:
                parameter, part = self.joined[known]
                return Place(f"{parameter.replace('*', number)}{end}", part)
        return None


def _siglip(tower: str) -> Mapping[str, str]:
    """Return the modules of SigLIP below `tower`."""
    layer = f"{tower}.encoder.layers.*"
    return {
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.blk.*.ln1": f"{layer}.layer_norm1",
        "v.blk.*.attn_q": f"{layer}.self_attn.q_proj",
        "v.blk.*.attn_k": f"{layer}.self_attn.k_proj",
        "v.blk.*.attn_v": f"{layer}.self_attn.v_proj",
        "v.blk.*.attn_out": f"{layer}.self_attn.out_proj",
        "v.blk.*.ln2": f"{layer}.layer_norm2",
        "v.blk.*.ffn_up": f"{layer}.mlp.fc1",
        "v.blk.*.ffn_down": f"{layer}.mlp.fc2",
        "v.post_ln": f"{tower}.post_layernorm",
    }


_GEMMA3 = MmprojNames(
    {
        **_siglip("vision_tower"),
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    {},
    norms=("multi_modal_projector.mm_soft_emb_norm.weight",),
)
_IDEFICS3 = MmprojNames(
    {**_siglip("vision_model"), "mm.model.fc": "connector.modality_projection.proj"}, {}
)
_GEMMA4_LAYER = "vision_tower.encoder.layers.*"
_GEMMA4_LINEAR = {
    "v.blk.*.attn_q": f"{_GEMMA4_LAYER}.self_attn.q_proj",
    "v.blk.*.attn_k": f"{_GEMMA4_LAYER}.self_attn.k_proj",
    "v.blk.*.attn_v": f"{_GEMMA4_LAYER}.self_attn.v_proj",
    "v.blk.*.attn_out": f"{_GEMMA4_LAYER}.self_attn.o_proj",
    "v.blk.*.ffn_gate": f"{_GEMMA4_LAYER}.mlp.gate_proj",
    "v.blk.*.ffn_up": f"{_GEMMA4_LAYER}.mlp.up_proj",
    "v.blk.*.ffn_down": f"{_GEMMA4_LAYER}.mlp.down_proj",
}
_GEMMA4 = MmprojNames(
    {
        **_GEMMA4_LINEAR,  # for the bounds of inputs and outputs
        **{f"{name}.weight": f"{to}.linear.weight" for name, to in _GEMMA4_LINEAR.items()},
        "v.blk.*.attn_q_norm": f"{_GEMMA4_LAYER}.self_attn.q_norm",
        "v.blk.*.attn_k_norm": f"{_GEMMA4_LAYER}.self_attn.k_norm",
        "v.blk.*.ln1": f"{_GEMMA4_LAYER}.input_layernorm",
        "v.blk.*.attn_post_norm": f"{_GEMMA4_LAYER}.post_attention_layernorm",
        "v.blk.*.ln2": f"{_GEMMA4_LAYER}.pre_feedforward_layernorm",
        "v.blk.*.ffn_post_norm": f"{_GEMMA4_LAYER}.post_feedforward_layernorm",
        "v.patch_embd.weight": "vision_tower.patch_embedder.input_proj.weight",
        "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias": "vision_tower.std_bias",
        "v.std_scale": "vision_tower.std_scale",
        "mm.input_projection": "embed_vision.embedding_projection",
    },
    {},
    ignored=("a.*", "mm.a.*"),  # the tower of sounds
    flattened=("vision_tower.patch_embedder.input_proj.weight",),
)
_QWEN = "visual.blocks.*"
_QWEN_MODULES = {
    "v.blk.*.ln1": f"{_QWEN}.norm1",
    "v.blk.*.ln2": f"{_QWEN}.norm2",
    "v.blk.*.attn_qkv": f"{_QWEN}.attn.qkv",
    "v.blk.*.attn_out": f"{_QWEN}.attn.proj",
    "v.patch_embd.bias": "visual.patch_embed.proj.bias",
}
_QWEN_JOINED = {
    "v.patch_embd.weight": ("visual.patch_embed.proj.weight", 0),
    "v.patch_embd.weight.1": ("visual.patch_embed.proj.weight", 1),
    "v.blk.*.attn_q": (f"{_QWEN}.attn.qkv", 0),
    "v.blk.*.attn_k": (f"{_QWEN}.attn.qkv", 1),
    "v.blk.*.attn_v": (f"{_QWEN}.attn.qkv", 2),
}
_QWEN2_MERGER = {
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_QWEN2 = MmprojNames(
    {
        **_QWEN_MODULES,
        **_QWEN2_MERGER,
        "v.blk.*.ffn_up": f"{_QWEN}.mlp.fc1",
        "v.blk.*.ffn_down": f"{_QWEN}.mlp.fc2",
    },
    _QWEN_JOINED,
)
_QWEN2_5 = MmprojNames(
    {
        **_QWEN_MODULES,
        **_QWEN2_MERGER,
        "v.blk.*.ffn_gate": f"{_QWEN}.mlp.gate_proj",
        "v.blk.*.ffn_up": f"{_QWEN}.mlp.up_proj",
        "v.blk.*.ffn_down": f"{_QWEN}.mlp.down_proj",
    },
    _QWEN_JOINED,
)
_QWEN3 = MmprojNames(
    {
        **_QWEN_MODULES,
        "v.position_embd": "visual.pos_embed",
        "v.blk.*.ffn_up": f"{_QWEN}.mlp.linear_fc1",
        "v.blk.*.ffn_down": f"{_QWEN}.mlp.linear_fc2",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
        "v.deepstack.*.norm": "visual.deepstack_merger_list.*.norm",
        "v.deepstack.*.fc1": "visual.deepstack_merger_list.*.linear_fc1",
        "v.deepstack.*.fc2": "visual.deepstack_merger_list.*.linear_fc2",
    },
    _QWEN_JOINED,
)
_PIXTRAL_LAYER = "vision_tower.transformer.layers.*"
_PIXTRAL = MmprojNames(
    {
        "v.patch_embd": "vision_tower.patch_conv",
        "v.pre_ln": "vision_tower.ln_pre",
        "v.blk.*.ln1": f"{_PIXTRAL_LAYER}.attention_norm",
        "v.blk.*.attn_q": f"{_PIXTRAL_LAYER}.attention.q_proj",
        "v.blk.*.attn_k": f"{_PIXTRAL_LAYER}.attention.k_proj",
        "v.blk.*.attn_v": f"{_PIXTRAL_LAYER}.attention.v_proj",
        "v.blk.*.attn_out": f"{_PIXTRAL_LAYER}.attention.o_proj",
        "v.blk.*.ln2": f"{_PIXTRAL_LAYER}.ffn_norm",
        "v.blk.*.ffn_gate": f"{_PIXTRAL_LAYER}.feed_forward.gate_proj",
        "v.blk.*.ffn_up": f"{_PIXTRAL_LAYER}.feed_forward.up_proj",
        "v.blk.*.ffn_down": f"{_PIXTRAL_LAYER}.feed_forward.down_proj",
        "mm.input_norm": "multi_modal_projector.norm",
        "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    },
    {},
    ignored=("v.token_embd.img_break*",),  # the text model's own row
    interleaved=("*.attention.q_proj", "*.attention.k_proj"),
)

_NAMES: Mapping[str, MmprojNames] = {
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "LlavaForConditionalGeneration": _PIXTRAL,
    "Mistral3ForConditionalGeneration": _PIXTRAL,
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Qwen3_5ForConditionalGeneration": _QWEN3,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
}
"""Names by architecture, as in config.json"""


def names_of(architecture: str) -> MmprojNames:
    """Return the names of an architecture that an mmproj file can have."""
    return _NAMES[architecture]
