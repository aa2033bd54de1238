"""GGUF files of small random models, as llama.cpp's converter lays them out.

Names of tensors and keys are those of the package `gguf`, which is llama.cpp's own.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
    quantize,
)
from gguf.quants import QuantError
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["ARCHITECTURES", "random_blocks", "write_gguf"]

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma": MODEL_ARCH.GEMMA,
    "jais2": MODEL_ARCH.JAIS2,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma3n_text": MODEL_ARCH.GEMMA3N,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "gemma4_unified_text": MODEL_ARCH.GEMMA4,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "cohere": MODEL_ARCH.COMMAND_R,
    "cohere2": MODEL_ARCH.COHERE2,
    "cohere2_moe": MODEL_ARCH.DOTS1,
    "laguna": MODEL_ARCH.STEP35,
    "arcee": MODEL_ARCH.ARCEE,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": MODEL_ARCH.GRANITE_MOE,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2,
    "granite": MODEL_ARCH.GRANITE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "gpt2": MODEL_ARCH.GPT2,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v32": MODEL_ARCH.GLM_DSA,
    "glm_moe_dsa": MODEL_ARCH.GLM_DSA,
    "minicpm3": MODEL_ARCH.MINICPM3,
    "kimi_linear": MODEL_ARCH.KIMI_LINEAR,
    "hy_v3": MODEL_ARCH.DOTS1,
    "minimax_m3_vl_text": MODEL_ARCH.DOTS1,
    "mellum": MODEL_ARCH.QWEN3MOE,
    "mimo_v2_flash": MODEL_ARCH.MIMO2,
    "falcon": MODEL_ARCH.FALCON,
    "gpt_bigcode": MODEL_ARCH.STARCODER,
    "bloom": MODEL_ARCH.BLOOM,
    "mpt": MODEL_ARCH.MPT,
    "dbrx": MODEL_ARCH.DBRX,
    "afmoe": MODEL_ARCH.AFMOE,
    "llama4_text": MODEL_ARCH.LLAMA4,
    "mistral4": MODEL_ARCH.MISTRAL4,
    "dots1": MODEL_ARCH.DOTS1,
    "minimax": MODEL_ARCH.MINIMAXM2,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "solar_open": MODEL_ARCH.GLM4_MOE,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "glm4_moe_lite": MODEL_ARCH.DEEPSEEK2,
    "youtu": MODEL_ARCH.DEEPSEEK2,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "bamba": MODEL_ARCH.GRANITE_HYBRID,
    "mamba": MODEL_ARCH.MAMBA,
    "falcon_mamba": MODEL_ARCH.MAMBA,
    "jamba": MODEL_ARCH.JAMBA,
    "mamba2": MODEL_ARCH.MAMBA2,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H_MOE,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "glm": MODEL_ARCH.CHATGLM,
    "glm4": MODEL_ARCH.GLM4,
    "exaone4": MODEL_ARCH.EXAONE4,
    "exaone_moe": MODEL_ARCH.EXAONE_MOE,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": MODEL_ARCH.HUNYUAN_MOE,
    "apertus": MODEL_ARCH.APERTUS,
    "nemotron": MODEL_ARCH.NEMOTRON,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
    "phi": MODEL_ARCH.PHI2,
    "phimoe": MODEL_ARCH.PHIMOE,
    "stablelm": MODEL_ARCH.STABLELM,
    "internlm3": MODEL_ARCH.LLAMA,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "olmo3": MODEL_ARCH.OLMO2,
}
"""Architectures of llama.cpp by transformers' model_type"""
_LATER = {
    "cohere2_moe": "cohere2moe",
    "deepseek_v32": "deepseek32",
    "hy_v3": "hy_v3",
    "laguna": "laguna",
    "mellum": "mellum",
    "minimax": "minimax-01",
    "minimax_m3_vl_text": "minimax-m3",
}
"""Names of architectures that this version of the package lacks; their tensors have the names of
another one"""
_INTERLEAVED = {
    "granitemoehybrid",
    *(
        "granitemoe",
        "granitemoeshared",
        "arcee",
        "llama",
        "mistral",
        "mixtral",
        "granite",
        "smollm3",
    ),
    *("internlm3", "ministral3"),
}
_SIGMOIDS = {
    *("afmoe", "cohere2_moe", "laguna"),
    *("deepseek_v32", "glm_moe_dsa", "hy_v3", "kimi_linear"),
    *(
        "deepseek_v3",
        "dots1",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "minimax_m2",
        "solar_open",
    ),
    *("mimo_v2_flash", "minimax_m3_vl_text"),
}
"""Families whose experts are weighed by sigmoids"""
_LIGHTNING = {
    "norm": "attn_norm_2",
    "out_proj": "attn_output",
    "output_gate": "attn_gate",
    "qkv_proj": "attn_qkv",
}
"""Names of lightning attention's modules, which this version of the package lacks"""
_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_WITHOUT_ATTENTION = {"falcon_mamba", "mamba", "mamba2"}
_WITHOUT_OFFSET = ("gemma2", "gemma3_", "minimax_m3", "qwen3_5", "qwen3_next", "nemotron")
"""Families to whose norms the converter adds 1"""
_KIND = GGMLQuantizationType
Numbers = npt.NDArray[np.float32]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = _KIND.F32,
    *,
    among: str = "",
    content: Mapping[str, Tensor] | None = None,
    further: Callable[[GGUFWriter], None] = lambda _: None,
    split_max_tensors: int = 0,
    architecture: MODEL_ARCH | None = None,
    fuses_qkv: bool = False,
) -> None:
    """Write a model.

    kind: of all matrices whose rows it divides; the others are float32. among: part of the names
    of these matrices. content: tensors to write in place of the model's own. further: writes more,
    or other values. architecture: another than that of the model's type.
    fuses_qkv: queries, keys and values are one tensor.
    """
    architecture = architecture or ARCHITECTURES[model.config.model_type]
    name = _LATER.get(model.config.model_type, MODEL_ARCH_NAMES[architecture])
    writer = GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    _write_metadata(writer, model.config)
    if model.config.model_type == "apertus":
        _write_xielu(writer, model.state_dict())
    _write_tokens(writer, model.config.vocab_size)
    further(writer)
    tensors = dict(_tensors(model, architecture))
    if fuses_qkv:
        tensors = _fused_qkv(tensors)
    for name, numbers in tensors.items():
        if content is not None:
            numbers = content[name].numpy().reshape(numbers.shape)
        block, _ = GGML_QUANT_SIZES[kind]
        stays = kind is _KIND.F32 or among not in name
        if stays or numbers.ndim == 1 or numbers.shape[-1] % block:
            writer.add_tensor(name, np.ascontiguousarray(numbers))
        elif kind is _KIND.F16:
            writer.add_tensor(name, numbers.astype(np.float16))
        else:
            writer.add_tensor(name, _encoded(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Return random blocks with scales near 2^-7."""
    block, size = GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // block
    blocks = np.random.default_rng(7).integers(0, 256, (count, size), dtype=np.uint8)
    half = np.frombuffer(np.float16(2**-7).tobytes(), np.uint8)
    for at in {
        _KIND.Q4_0: (0,),
        _KIND.Q4_1: (0, 2),
        _KIND.Q5_0: (0,),
        _KIND.Q5_1: (0, 2),
        _KIND.Q8_0: (0,),
        _KIND.MXFP4: (),
        _KIND.NVFP4: (),
        _KIND.Q2_K: (80, 82),
        _KIND.Q3_K: (108,),
        _KIND.Q4_K: (0, 2),
        _KIND.Q5_K: (0, 2),
        _KIND.Q6_K: (208,),
        _KIND.IQ4_NL: (0,),
        _KIND.IQ4_XS: (0,),
        _KIND.IQ3_S: (0,),
        _KIND.IQ3_XXS: (0,),
        _KIND.IQ2_S: (0,),
        _KIND.IQ2_XS: (0,),
        _KIND.IQ2_XXS: (0,),
        _KIND.IQ1_S: (0,),
        _KIND.IQ1_M: (),
        _KIND.TQ2_0: (64,),
    }[kind]:
        blocks[:, at : at + 2] = half
    if kind is _KIND.IQ1_M:  # a scale's four bits lie in each of the last words
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | np.array([0, 0, 0, 32], np.uint8)
    if kind is _KIND.MXFP4:
        blocks[:, 0] = 120
    if kind is _KIND.NVFP4:
        blocks[:, :4] = blocks[:, :4] % 32
    return blocks.reshape(*shape[:-1], shape[-1] // block * size)


def _encoded(numbers: Numbers, kind: GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    try:
        return quantize(np.ascontiguousarray(numbers), kind)
    except (QuantError, NotImplementedError):
        return random_blocks(numbers.shape, kind)


def _tensors(model: PreTrainedModel, architecture: MODEL_ARCH) -> Iterator[tuple[str, Numbers]]:
    config = model.config
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    experts: dict[str, dict[int, Tensor]] = {}
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    if config.model_type == "stablelm":
        state = _stacked_norms(state)
    for name, whole in state.items():
        for part, tensor in _split(name, whole, config):
            prefix, _, rest = part.partition(".experts.")
            number, _, stem = rest.partition(".")
            if part.startswith("model.altup"):
                prefix, number, stem = part.rsplit(".", 2)
                experts.setdefault(f"{prefix}.{stem}", {})[int(number)] = tensor
                continue
            if number.isdigit():
                experts.setdefault(f"{prefix}.experts.{stem}", {})[int(number)] = tensor
                continue
            yield _name(names, part), _laid_out(part, tensor, config).float().numpy()
    for name, parts in experts.items():
        stacked = torch.stack([parts[number] for number in sorted(parts)])
        yield _name(names, name), stacked.float().numpy()


def _fused_qkv(tensors: dict[str, Numbers]) -> dict[str, Numbers]:
    found, parts = {}, dict[str, list[Numbers]]()
    for name, numbers in tensors.items():  # queries come before keys, keys before values
        if re.search(r"attn_[qkv]\.", name):
            parts.setdefault(re.sub(r"attn_[qkv]\.", "attn_qkv.", name), []).append(numbers)
        else:
            found[name] = numbers
    return found | {name: np.concatenate(three) for name, three in parts.items()}


def _stacked_norms(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return StableLM's tensors, with the norms of all heads as one."""
    found, norms = {}, dict[str, list[Tensor]]()
    for name, tensor in state.items():
        stem, apart, _ = name.partition(".norms.")
        if apart:
            norms.setdefault(f"{stem}.weight", []).append(tensor)
        else:
            found[name] = tensor
    return found | {name: torch.stack(parts) for name, parts in norms.items()}


def _name(names: Any, name: str) -> str:
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("mlp.exp_probs_b"):
        return f"blk.{layer}.exp_probs_b"
    module, _, end = name.partition(".self_attn.")[2].partition(".")
    if module in _LIGHTNING:
        return f"blk.{layer}.{_LIGHTNING[module]}.{end}"
    block, _, part = name.rpartition(".self_attn.indexer.")
    if block and re.match("[qk]_(proj|norm)", part) and ".bias" not in part:
        return f"blk.{layer}.indexer.{part}"
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _split(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the converter makes of one: experts and their two products apart."""
    if config.model_type == "bloom":  # as in published files
        name = name.removeprefix("transformer.")
    if config.model_type == "dbrx" and ".experts." in name:
        stack = tensor.view(-1, config.ffn_config.ffn_hidden_size, tensor.shape[1])
        yield f"{name}.weight", stack.transpose(1, 2) if name.endswith("w2") else stack
        return
    if config.model_type == "nemotron_h" and ".experts." in name:
        layer, _, product = name.rpartition(".mixer.experts.")
        yield f"{layer}.mlp.experts.{product}.weight", tensor
        return
    if config.model_type == "nemotron_h":  # as in published files
        name = re.sub("^model", "backbone", name)
    if ".act_fn." in name or name.endswith(("slope_rate", "_decay")):  # values of the header
        return
    if name.endswith("moe_statics.e_score_correction_bias"):
        layer = name.partition(".mlp.")[0]
        yield f"{layer}.mlp.moe_statics.e_score_correction.bias", tensor.squeeze(0)
        return
    if name.endswith("self_attn.sinks"):
        yield f"{name}.weight", tensor
        return
    if name.endswith(("layer_scalar", "correct_output_scale")):
        yield f"{name}.weight", tensor
        return
    if config.model_type == "gemma4_text" and name.endswith("gate_up_proj"):
        yield f"{name}.weight", tensor
        return
    if config.model_type == "hy_v3" and name.endswith("e_score_correction_bias"):
        yield name.replace("e_score_correction_bias", "exp_probs_b"), tensor
        return
    if name.endswith("e_score_correction_bias"):
        yield name.replace("correction_bias", "correction.bias"), tensor
        return
    if config.model_type == "kimi_linear":
        name = name.replace("forget_gate.", "")  # as in published files
        if name.endswith("self_attn.conv1d.weight"):
            for part, content in zip("qkv", tensor.squeeze(1).chunk(3), strict=True):
                yield name.replace("conv1d", f"{part}_conv1d"), content
            return
    if name.endswith("kv_b_proj.weight") and config.model_type != "minicpm3":
        heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        widths = (config.qk_nope_head_dim, config.v_head_dim)
        keys, values = heads.split_with_sizes(widths, dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
        return
    if name.endswith("expert_bias"):
        yield f"{name}.bias", tensor
        return
    if config.model_type == "llama4_text" and ".experts." in name:
        tensor = tensor.transpose(1, 2)
    if config.model_type.startswith("granitemoe"):  # as the names map knows them
        name = name.replace("block_sparse_moe.experts", "mlp.experts")
        name = name.replace("router.weight", "router.layer.weight")
    if name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), tensor
        return
    if name.endswith("in_proj_qkvz.weight"):
        qkv, gate = _parts_of_groups(tensor, config)
        yield name.replace("qkvz", "qkv"), qkv
        yield name.replace("in_proj_qkvz", "in_proj_z"), gate
        return
    if config.model_type.startswith("granitemoe") and "shared_mlp" in name:
        yield from _shared_layer(name, tensor, config)
        return
    if name.endswith("expert_bias"):
        yield f"{name}.bias", tensor
        return
    stem, _, last = name.rpartition(".")
    if config.model_type == "gpt_oss" and stem.endswith("mlp.experts"):
        suffix = "bias" if last.endswith("_bias") else "weight"
        kind = last.removesuffix("_bias")
        whole = tensor if suffix == "bias" else tensor.transpose(1, 2)
        parts = {"down_proj": whole}
        if kind == "gate_up_proj":
            parts = {"gate_proj": whole[:, ::2], "up_proj": whole[:, 1::2]}
        for part, content in parts.items():
            yield f"{stem}.{part}.{suffix}", content
    elif config.model_type.startswith("minimax_m3") and name.endswith("gate_up_proj.weight"):
        for part, content in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj"), content
    elif last in ("gate_up_proj", "down_proj") and stem.endswith("experts"):
        if last == "gate_up_proj":
            half = tensor.shape[1] // 2
            yield f"{stem}.gate_proj.weight", tensor[:, :half]
            yield f"{stem}.up_proj.weight", tensor[:, half:]
        else:
            yield f"{stem}.down_proj.weight", tensor
    else:
        yield name, tensor


def _laid_out(name: str, tensor: Tensor, config: Any) -> Tensor:
    kind = config.model_type
    if "linear_attn" in name:
        return _delta_net(name, tensor, config)
    if "conv.conv" in name:
        return tensor.squeeze(1)
    if kind == "kimi_linear" and name.endswith("A_log"):
        return -tensor.exp()
    if kind == "falcon_h1":
        tensor = _multiplied(name, tensor, config)
    if ".mamba." in name or (kind in (*_WITHOUT_ATTENTION, "nemotron_h") and "layers" in name):
        return _mamba(name, tensor, config)
    has_offset = kind == "gemma" or kind.startswith(_WITHOUT_OFFSET)
    if has_offset and name.endswith("norm.weight"):
        return tensor + 1
    if kind in ("bloom", "gpt_neox") and "query_key_value" in name:
        by_head = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)
    if kind == "falcon" and "query_key_value" in name:
        keys = config.num_kv_heads if config.new_decoder_architecture else 1
        by_head = tensor.view(keys, -1, config.head_dim, *tensor.shape[1:])
        parts = (by_head[:, :-2], by_head[:, -2], by_head[:, -1])
        return torch.cat([each.reshape(-1, *tensor.shape[1:]) for each in parts])
    if kind == "gpt2" and name.endswith(("attn.weight", "fc.weight", "proj.weight")):
        return tensor.T
    if kind in _INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _parts_of_groups(tensor: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Return queries, keys and values, then gates, from rows in the order of key heads."""
    groups = config.linear_num_key_heads
    values = config.linear_num_value_heads // groups * config.linear_value_head_dim
    keys = config.linear_key_head_dim
    rows = tensor.view(groups, -1, tensor.shape[1])
    parts = rows.split_with_sizes((keys, keys, values, values), dim=1)
    *inputs, gates = (each.reshape(-1, tensor.shape[1]) for each in parts)
    return torch.cat(inputs), gates


def _delta_net(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Lay out a tensor of a gated delta net; Qwen 3.5's value heads change their order."""
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if "conv1d" in name:
        tensor = tensor.squeeze(1)
    if config.model_type == "qwen3_next" or name.endswith("norm.weight"):
        return tensor
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    if "out_proj" in name:
        return _tiled(tensor.T, groups, heads).T
    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[:-values], _tiled(tensor[-values:], groups, heads)))
    return _tiled(tensor, groups, heads)


def _shared_layer(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the products of Granite's shared layer, which is the only one without experts."""
    layer = name.partition(".shared_mlp")[0]
    module = "mlp.shared_expert" if config.num_local_experts else "mlp"
    names = ("gate_proj", "up_proj") if "input_linear" in name else ("down_proj",)
    for part, numbers in zip(names, tensor.chunk(len(names)), strict=True):
        yield f"{layer}.{module}.{part}.weight", numbers


def _mamba(name: str, tensor: Tensor, config: Any) -> Tensor:
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith(("A_log", ".D")) and tensor.ndim == 1:
        return tensor[:, None]
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1)
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return tensor.view(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    return tensor


def _multiplied(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Return a weight of Falcon-H1 times its multipliers, which llama.cpp has not."""
    state = config.mamba_n_groups * config.mamba_d_state
    widths = torch.tensor([config.mamba_d_ssm] * 2 + [state] * 2 + [config.mamba_n_heads])
    rows = torch.tensor(config.ssm_multipliers).repeat_interleave(widths)[:, None]
    before = config.attention_in_multiplier
    factors: dict[str, Tensor | float] = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "q_proj": before,
        "k_proj": before * config.key_multiplier,
        "v_proj": before,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "in_proj": rows * config.ssm_in_multiplier,
        "out_proj": config.ssm_out_multiplier,
    }
    return tensor * factors.get(name.split(".")[-2], 1.0)


def _tiled(rows: Tensor, groups: int, heads: int) -> Tensor:
    """Return the first value head of each group, then the second one of each, …"""
    parts = rows.reshape(groups, heads // groups, -1, *rows.shape[1:])
    return parts.transpose(0, 1).reshape(rows.shape)


def _write_metadata(writer: GGUFWriter, config: Any) -> None:
    if config.model_type in _GEMMA4:  # has values of each layer, which attributes hide
        config = SimpleNamespace(**config.to_dict())
    if config.model_type in _WITHOUT_ATTENTION:
        _write_recurrent(writer, config)
        return
    if config.model_type in ("bloom", "mpt", "dbrx"):
        config = _with_common_keys(writer, config)
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if config.model_type != "qwen3_5_moe_text":  # none of its layers is dense
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        inner = getattr(config, "intermediate_size_mlp", inner)
        inner = getattr(config, "dense_intermediate_size", inner)
        inner = getattr(config, "prefix_dense_intermediate_size", inner)
        writer.add_feed_forward_length(inner)
    writer.add_head_count(getattr(config, "num_attention_heads_per_layer", heads))
    writer.add_head_count_kv(_key_heads(config))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _write_norms(writer, config)
    _write_rope(writer, config, head_dim)
    if hasattr(config, "kv_lora_rank") or config.model_type in _SIGMOIDS:
        _write_routing(writer, config)
    if config.model_type == "minicpm3":
        _write_unsplit_latent(writer, config)
    elif hasattr(config, "kv_lora_rank"):
        _write_latent(writer, config)
    if config.model_type in _GEMMA4:
        _write_gemma4(writer, config)
    if config.model_type == "gemma3n_text":
        _write_gemma3n(writer, config)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if config.model_type in ("exaone4", "exaone_moe", "mellum", "olmo3"):
            has_window = [kind == "sliding_attention" for kind in config.layer_types]
            writer.add_sliding_window_pattern(has_window)
        if config.model_type == "mellum":
            writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.model_type == "mimo_v2_flash":
        _write_mimo(writer, config)
    if hasattr(config, "use_parallel_residual"):
        writer.add_parallel_residual(config.use_parallel_residual or writer.arch == "stablelm")
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping or 0.0)
        writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    if config.model_type == "cohere2_moe":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        has_window = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(has_window)
    if config.model_type == "laguna":
        near = config.rope_parameters["sliding_attention"]
        writer.add_rope_freq_base_swa(near["rope_theta"])
        writer.add_rope_dimension_count_swa(int(head_dim * near["partial_rotary_factor"]))
    if config.model_type.startswith("cohere"):
        writer.add_logit_scale(config.logit_scale)
    if config.model_type.startswith("granite"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "minimax":
        writer.add_residual_scale(config.mlp_alpha_factor)
    counts = ("num_local_experts", "num_experts", "moe_num_experts")
    if experts := next((n for each in counts if (n := getattr(config, each, None))), None):
        writer.add_expert_count(experts)
        chosen = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
        found = (getattr(config, each, None) for each in chosen)
        writer.add_expert_used_count(next(each for each in found if each))
        if config.model_type == "ernie4_5_moe":
            writer.add_leading_dense_block_count(config.moe_layer_start_index)
            writer.add_interleave_moe_layer_step(config.moe_layer_interval)
            writer.add_expert_shared_count(config.moe_num_shared_experts)
            writer.add_expert_shared_feed_forward_length(config.intermediate_size // 2)
        if getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if getattr(config, "shared_expert_intermediate_size", None):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "minimax_m3_vl_text":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(config.shared_intermediate_size // config.intermediate_size)
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk_blocks)
        writer.add_uint32(f"{writer.arch}.attention.indexer.block_size", config.index_block_size)
        local = config.index_local_blocks
        writer.add_uint32(f"{writer.arch}.attention.indexer.local_blocks", local)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.model_type == "llama4_text":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if hasattr(config, "conv_L_cache"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
        attends = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
        writer.add_leading_dense_block_count(getattr(config, "num_dense_layers", 0))
    if config.model_type == "nemotron_h":
        _write_nemotron(writer, config)
    if config.model_type == "jamba":
        _write_jamba(writer, config)
    if hasattr(config, "mamba_n_heads"):
        _write_mamba(writer, config)
    if hasattr(config, "linear_num_key_heads"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        recurrent = [kind == "linear_attention" for kind in config.layer_types]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
        writer.add_full_attention_interval(4)


def _write_mimo(writer: GGUFWriter, config: Any) -> None:
    has_window = [kind == "sliding_attention" for kind in config.layer_types]
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads * (2 if each else 1) for each in has_window])
    writer.add_value_length(config.v_head_dim)
    writer.add_sliding_window(config.sliding_window - 1)  # without the query's own token
    writer.add_sliding_window_pattern(has_window)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _write_mamba(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    if config.model_type == "falcon_h1":
        return
    attends = [kind == "full_attention" for kind in config.layers_block_type]
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
    is_granite = config.model_type == "granitemoehybrid"
    writer.add_rope_scaling_finetuned(not is_granite or config.position_embedding_type == "rope")
    if is_granite:
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _write_recurrent(writer: GGUFWriter, config: Any) -> None:
    """Write the values of a model without attention, as llama.cpp's converter does."""
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.state_size)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if config.model_type == "mamba2":
        writer.add_ssm_inner_size(config.num_heads * config.head_dim)
        writer.add_ssm_time_step_rank(config.num_heads)
        writer.add_ssm_group_count(config.n_groups)
        return
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def _write_jamba(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])


def _write_nemotron(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    kinds = config.layers_block_type
    writer.add_feed_forward_length([widths.get(kind, 0) for kind in kinds])
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads * (kind == "full_attention") for kind in kinds])
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _with_common_keys(writer: GGUFWriter, config: Any) -> Any:
    """Return a config with the names that other families have, and write what they lack."""
    attention: Any = getattr(config, "attn_config", None)
    experts: Any = getattr(config, "ffn_config", None)
    if config.model_type == "mpt":
        writer.add_max_alibi_bias(attention.alibi_bias_max)
    if clip := getattr(attention, "clip_qkv", None):
        writer.add_clamp_kqv(clip)
    found = {key: getattr(config, key, None) for key in ("rope_parameters", "layer_norm_epsilon")}
    if experts is not None:
        found |= {"layer_norm_epsilon": 1e-5, "num_key_value_heads": attention.kv_n_heads}
        found |= {"intermediate_size": experts.ffn_hidden_size}
        found |= {"num_experts": experts.moe_num_experts, "moe_k": experts.moe_top_k}
    return SimpleNamespace(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_hidden_layers=config.num_hidden_layers,
        max_position_embeddings=_first_of(config, "seq_length", "max_seq_len"),
        **found,
    )


def _key_heads(config: Any) -> int:
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1
    own = _first_of(config, "num_key_value_heads", "num_kv_heads")
    return int(own or config.num_attention_heads)


def _write_routing(writer: GGUFWriter, config: Any) -> None:
    kinds = getattr(config, "mlp_layer_types", [])
    dense = _first_of(config, "first_k_dense_replace", "num_dense_layers")
    writer.add_leading_dense_block_count(kinds.count("dense") if dense is None else dense)
    shared = _first_of(config, "n_shared_experts", "num_shared_experts")
    writer.add_expert_shared_count(shared or 0)
    scales = ("route_scale", "router_scaling_factor", "moe_routed_scaling_factor")
    scale = _first_of(config, "routed_scaling_factor", *scales)
    if scale is None:
        return
    writer.add_expert_weights_scale(scale)
    if config.model_type == "hy_v3":  # whose shared experts have a width, but no number
        width = config.moe_intermediate_size * config.num_shared_experts
        writer.add_expert_shared_feed_forward_length(width)
    if getattr(config, "norm_topk_prob", True):
        writer.add_expert_weights_norm(True)
    if (getattr(config, "n_group", None) or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type in _SIGMOIDS:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _first_of(config: Any, *names: str) -> Any:
    """Return the first attribute that is there; None: none is."""
    return next((each for name in names if (each := getattr(config, name, None)) is not None), None)


def _write_latent(writer: GGUFWriter, config: Any) -> None:
    latent, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(latent)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    rope = getattr(config, "rope_parameters", None) or {}
    if (weight := rope.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)
    if hasattr(config, "index_topk"):
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
    if kinds := getattr(config, "indexer_types", None):
        has_indexer = [kind == "full" for kind in kinds]
        writer.add_array(f"{writer.arch}.attention.indexer.types", has_indexer)
    if config.model_type == "kimi_linear":
        writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
        writer.add_rope_dimension_count(rotated)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_kda_head_dim(config.linear_head_dim)


def _write_unsplit_latent(writer: GGUFWriter, config: Any) -> None:
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_q_lora_rank(config.q_lora_rank)


def _write_gemma3n(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_altup_active_idx(config.altup_active_idx)
    shares = torch.tensor(config.activation_sparsity_pattern)
    writer.add_activation_sparsity_scale(torch.special.ndtri(shares).tolist())
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _write_gemma4(writer: GGUFWriter, config: Any) -> None:
    has_window = [kind == "sliding_attention" for kind in config.layer_types]
    shared, layers = config.num_kv_shared_layers, config.num_hidden_layers
    writer.add_sliding_window_pattern(has_window)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(getattr(config, "hidden_size_per_layer_input", 0))
    whole = next(iter(config.per_layer_config.values()))
    writer.add_key_length(whole["head_dim"])
    writer.add_value_length(whole["head_dim"])
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(whole["head_dim"])
    writer.add_rope_dimension_count_swa(config.head_dim)
    if config.use_double_wide_mlp:
        factors = [2 if layer >= layers - shared else 1 for layer in range(layers)]
        writer.add_feed_forward_length([config.intermediate_size * each for each in factors])
    if (heads := whole.get("num_key_value_heads")) is not None:
        near = config.num_key_value_heads
        writer.add_head_count_kv([near if each else heads for each in has_window])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rope, half = config.rope_parameters["full_attention"], whole["head_dim"] // 2
    turned = int(half * rope["partial_rotary_factor"])
    divisors = np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _write_xielu(writer: GGUFWriter, state: dict[str, Tensor]) -> None:
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        constants = [tensor.item() for key, tensor in state.items() if key.endswith(f".{name}")]
        getattr(writer, f"add_xielu_{name}")(constants)


def _write_norms(writer: GGUFWriter, config: Any) -> None:
    keys = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps")
    for key in keys:
        if (epsilon := getattr(config, key, None)) is not None:
            is_rms = (
                key == "rms_norm_eps"
                or config.model_type == "nemotron_h"
                or hasattr(config, "conv_L_cache")
            )
            (writer.add_layer_norm_rms_eps if is_rms else writer.add_layer_norm_eps)(epsilon)


def _write_rope(writer: GGUFWriter, config: Any, head_dim: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, rotated))
    elif kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    elif kind in ("linear", "yarn"):
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _llama3_divisors(rope: dict[str, Any], rotated: int) -> Numbers:
    """Return the factors by which Llama 3.1's scaling divides each frequency."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, rotated, 2) / rotated)
    lengths = 2 * np.pi / frequencies
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def _write_tokens(writer: GGUFWriter, size: int) -> None:
    """Write a byte-level vocabulary with one merge."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*(f"<{number}>" for number in range(size - 3)), "a", "b", "ab"])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (size - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
