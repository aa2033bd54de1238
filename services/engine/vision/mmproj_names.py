"""Names of the tensors in mmproj files, by the names of transformers' parameters.

The names in the files are those of llama.cpp (`gguf-py/gguf/tensor_mapping.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MmprojNames", "Place", "names_of"]


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
    """Modules of transformers by the names in the files; * stands for the number of a layer"""
    joined: Mapping[str, tuple[str, int]]
    """Modules whose tensors are parts of a module of transformers, as (module, part)"""
    ignored: tuple[str, ...] = ()
    """Tensors that the tower does not need"""
    norms: tuple[str, ...] = ()
    """Parameters to which the converter has added 1"""
    interleaved: tuple[str, ...] = ()
    """Modules whose heads the converter has reordered for RoPE of neighbouring numbers"""

    def place(self, name: str) -> Place | None:
        """Return the place of a tensor; None if the architecture has no such tensor."""
        if name in self.modules:
            return Place(self.modules[name])
        if name in self.joined:
            return Place(*self.joined[name])
        module, _, suffix = name.rpartition(".")
        layer = re.search(r"\.(\d+)\.", module)
        if layer is not None:
            module = f"{module[: layer.start()]}.*.{module[layer.end() :]}"
        number = "" if layer is None else layer[1]
        if module in self.modules:
            return Place(f"{self.modules[module].replace('*', number)}.{suffix}")
        if module in self.joined:
            parameter, part = self.joined[module]
            return Place(f"{parameter.replace('*', number)}.{suffix}", part)
        return None


_SIGLIP = "vision_tower.encoder.layers.*"
_GEMMA3 = MmprojNames(
    {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.blk.*.ln1": f"{_SIGLIP}.layer_norm1",
        "v.blk.*.attn_q": f"{_SIGLIP}.self_attn.q_proj",
        "v.blk.*.attn_k": f"{_SIGLIP}.self_attn.k_proj",
        "v.blk.*.attn_v": f"{_SIGLIP}.self_attn.v_proj",
        "v.blk.*.attn_out": f"{_SIGLIP}.self_attn.out_proj",
        "v.blk.*.ln2": f"{_SIGLIP}.layer_norm2",
        "v.blk.*.ffn_up": f"{_SIGLIP}.mlp.fc1",
        "v.blk.*.ffn_down": f"{_SIGLIP}.mlp.fc2",
        "v.post_ln": "vision_tower.post_layernorm",
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    {},
    norms=("multi_modal_projector.mm_soft_emb_norm.weight",),
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
    "LlavaForConditionalGeneration": _PIXTRAL,
    "Mistral3ForConditionalGeneration": _PIXTRAL,
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Qwen3_5ForConditionalGeneration": _QWEN3,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3,
}
"""Names by architecture, as in config.json"""


def names_of(architecture: str) -> MmprojNames:
    """Return the names of an architecture that an mmproj file can have."""
    return _NAMES[architecture]
