"""Families as GGUF files store them, with other tensor names and partly converted weights."""

from dataclasses import replace

from services.engine.model.checkpoint.attention_names import (
    BlockIndexNames,
    IndexNames,
    LatentNames,
)
from services.engine.model.checkpoint.config import Config
from services.engine.model.checkpoint.expert_names import ExpertTensorNames
from services.engine.model.checkpoint.family import (
    AltUpNames,
    BesideNames,
    DeltaNetNames,
    Family,
    HeadStage,
    LayerInputNames,
    TensorNames,
)
from services.engine.model.checkpoint.recurrent_names import (
    ConvolutionNames,
    LightningNames,
    MambaNames,
    SelectiveNames,
)

__all__ = ["gguf_family"]

_INTERLEAVED = {
    "ArceeForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "Ministral3ForCausalLM",
    "SmolLM3ForCausalLM",
}
"""Families whose queries and keys llama.cpp reorders for its own RoPE"""
_POST_ATTENTION_NORM = {"Glm4MoeForCausalLM", "GptOssForCausalLM", "SeedOssForCausalLM"}
"""Families whose norm before the feed-forward layer is named like one after attention"""
_ATTENTION_OUTPUT_NORM = {"DbrxForCausalLM"}
"""Families whose norm before the feed-forward layer is named like one of attention's output"""
_UNFUSED_GATES = {"GraniteMoeHybridForCausalLM", "MiniMaxM3VLForCausalLM"}
"""Families whose dense layers' gate and up are apart, while transformers stores them as one"""
_IGNORED = ("rope_freqs.weight", "rope_factors_*.weight", "*.attn_rot_embd", "dense_*.weight")
_FIRST_STAGE, _HEAD_NORM = "cls", "cls.norm"
"""Modules of a head that have an activation and a LayerNorm"""
_KEYS = ("blk.*.attn_k.weight", "blk.*.attn_k_norm.weight", "blk.*.attn_v.weight")
"""Tensors that files may hold for layers that share the keys of earlier ones"""
_BESIDE = BesideNames(
    dense_post_norm="post_ffw_norm_1",
    norm="pre_ffw_norm_2",
    post_norm="post_ffw_norm_2",
    router_scale="ffn_gate_inp.scale",
    expert_scale="ffn_down_exps.scale",
)
_LATENT = LatentNames(
    query_down="attn_q_a",
    query_norm="attn_q_a_norm",
    query_up="attn_q_b",
    queries="attn_q",
    latents="attn_kv_a_mqa",
    latent_norm="attn_kv_a_norm",
    expansion=("attn_k_b", "attn_v_b"),
)
_INDEX = IndexNames(
    queries="indexer.attn_q_b",
    keys="indexer.attn_k",
    key_norm="indexer.k_norm",
    head_weights="indexer.proj",
)
_BLOCK_INDEX = BlockIndexNames(
    queries="indexer.q_proj",
    keys="indexer.k_proj",
    query_norm="indexer.q_norm",
    key_norm="indexer.k_norm",
)
_CHANNEL_DELTA_NET = DeltaNetNames(
    inputs=("attn_q", "attn_k", "attn_v"),
    rates=("ssm_beta",),
    gate=("ssm_g_a", "ssm_g_b"),
    decay=("ssm_f_a", "ssm_f_b"),
    decays_channels=True,
    convolution=("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"),
    a_log="ssm_a",
    has_rates=True,
    dt_bias="ssm_dt.bias",
    norm="ssm_norm.weight",
    output="attn_output",
)
"""Names of Kimi's delta attention, in which each channel of a key decays"""
_CONVOLUTION = ConvolutionNames(
    inputs="shortconv.in_proj", convolution="shortconv.conv", output="shortconv.out_proj"
)
_LIGHTNING = LightningNames(
    inputs="attn_qkv", gate="attn_gate", norm="attn_norm_2.weight", output="attn_output"
)
_MAMBA = MambaNames(
    inputs="ssm_in",
    convolution="ssm_conv1d",
    a_log="ssm_a",
    has_rates=True,
    step_bias="ssm_dt.bias",
    skip="ssm_d",
    norm="ssm_norm.weight",
    norm_by_group=True,
    output="ssm_out",
)
_SELECTIVE = SelectiveNames(
    inputs="ssm_in",
    convolution="ssm_conv1d",
    factors="ssm_x",
    steps="ssm_dt",
    a_log="ssm_a",
    has_rates=True,
    skip="ssm_d",
    output="ssm_out",
)
_STEP_NORMS = ("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm")
_LAYER_INPUTS = LayerInputNames(
    table="per_layer_token_embd",
    projection="per_layer_model_proj",
    norm="per_layer_proj_norm",
    gate="inp_gate",
    output="proj",
    post_norm="post_norm",
)

_ALTUP = AltUpNames(
    router_norm="altup_router_norm",
    router="altup_router",
    prediction="altup_predict_coef",
    correction="altup_correct_coef",
    scale="altup_correct_scale.weight",
    laurel_left="laurel_l",
    laurel_right="laurel_r",
    laurel_norm="laurel_post_norm",
    expansion="altup_proj.{}",
    merger="altup_unembd_proj.{}",
)


def gguf_family(family: Family, mark: Config) -> Family:
    """Return a family with the names and conventions of GGUF.

    The converter of llama.cpp has added 1 to the norms of Gemma and Nemotron, transposed
    GPT-2's weights, sorted GPT-NeoX's queries, keys and values, taken gpt-oss's experts apart, and
    moved the two of a RoPE pair of GLM-4V apart.
    mark: the keys of the config that describe the file.
    """
    decoder = mark.text("decoder", family.architecture)
    names = _names(family.names, mark.flag("fused_qkv", False), family.gated)
    if family.has_single_parts:
        names = replace(names, feed_forward_norm="attn_norm")
    if decoder in _POST_ATTENTION_NORM:
        names = replace(names, feed_forward_norm="post_attention_norm")
    if decoder in _ATTENTION_OUTPUT_NORM:
        names = replace(names, feed_forward_norm="attn_output_norm")
    if decoder in _UNFUSED_GATES:
        names = replace(names, gate=("ffn_gate", "ffn_up"))
    if decoder == "MiniCPM3ForCausalLM":
        names = replace(names, latent=replace(_LATENT, expansion=("attn_kv_b",)))
    if decoder == "HYV3ForCausalLM":
        assert names.experts is not None
        names = replace(names, experts=replace(names.experts, choice_bias="exp_probs_b"))
    encoder = family.encoder
    if encoder is not None:
        if not encoder.norms_first:
            names = names.with_norms("attn_output_norm", "layer_output_norm")
        if family.gated and not mark.flag("fused_gate", False):
            names = replace(names, gate=("ffn_gate", "ffn_up"))
        types = None if encoder.token_types is None else "token_types"
        encoder = replace(encoder, embedding_norm="token_embd_norm", token_types=types)
    keeps_pairs = family.interleaved_rotary and not mark.flag("rotary_sections", False)
    shares_keys = family.is_gemma4 or family.names.altup is not None
    return replace(
        family,
        names=replace(names, ignored=(*_IGNORED, *(_KEYS if shares_keys else ()))),
        encoder=encoder,
        head=_head(family, mark),
        output_bias_key="attention_output_bias",
        qkv_by_head=False,
        parallel_norms=("attn_norm_2", "attn_norm"),
        norm_offset=False,
        transposed=False,
        interleaved_rotary=keeps_pairs or decoder in _INTERLEAVED,
    )


def _head(family: Family, mark: Config) -> tuple[HeadStage, ...]:
    """Return the stages of the head that scores texts."""
    activation = "tanh" if family.encoder is None or not family.encoder.norms_first else "gelu"
    listed = mark.texts("head") if mark.has("head") else ()
    stages = [
        HeadStage(name, activation if name == _FIRST_STAGE else "identity", name == _HEAD_NORM)
        for name in listed
    ]
    if stages:
        stages[-1] = replace(stages[-1], narrows=True, is_difference=mark.flag("answers", False))
    return tuple(stages)


def _names(names: TensorNames, fused_qkv: bool, gated: bool) -> TensorNames:
    feed_forward_norm = None if names.feed_forward_norm is None else "ffn_norm"
    if names.delta_net is not None and names.delta_net.decay is None:
        feed_forward_norm = "post_attention_norm"
    experts = None
    if names.experts is not None:
        shared = ("ffn_gate_shexp", "ffn_up_shexp") if gated else ("ffn_up_shexp",)
        experts = ExpertTensorNames(
            router="ffn_gate_inp",
            gate=("ffn_gate_exps.{}", "ffn_up_exps.{}") if gated else ("ffn_up_exps.{}",),
            down="ffn_down_exps.{}",
            shared_gate=shared if names.experts.shared_gate else (),
            shared_down="ffn_down_shexp",
            shared_router="ffn_gate_inp_shexp" if names.experts.shared_router else "",
            choice_bias="exp_probs_b.bias" if names.experts.choice_bias else "",
        )
    return TensorNames(
        roots={"": "output"},
        embedding="token_embd",
        embedding_norm=None if names.embedding_norm is None else "token_embd_norm",
        positions=None if names.positions is None else "position_embd",
        layers="blk",
        final_norm="output_norm" if names.convolution is None else "token_embd_norm",
        attention_norm=None if names.attention_norm is None else "attn_norm",
        qkv=("attn_qkv",) if fused_qkv else ("attn_q", "attn_k", "attn_v"),
        query_norm="attn_q_norm",
        key_norm="attn_k_norm",
        sinks=None if names.sinks is None else "attn_sinks.weight",
        output_gate=None if names.output_gate is None else "attn_gate",
        output="attn_output",
        attention_post_norm=None if names.attention_post_norm is None else "post_attention_norm",
        feed_forward_norm=feed_forward_norm,
        gate=("ffn_up",) if len(names.gate) == 1 else ("ffn_gate", "ffn_up"),
        down="ffn_down",
        feed_forward_post_norm=None if names.feed_forward_post_norm is None else "post_ffw_norm",
        experts=experts,
        latent=None if names.latent is None else _latent(names.latent),
        block_index=None if names.block_index is None else _BLOCK_INDEX,
        delta_net=None if names.delta_net is None else _delta_net(names.delta_net),
        convolution=None if names.convolution is None else _CONVOLUTION,
        lightning=None if names.lightning is None else _LIGHTNING,
        mamba=None if names.mamba is None else _MAMBA,
        selective=None if names.selective is None else _selective(names.selective),
        beside=_BESIDE,
        layer_inputs=_LAYER_INPUTS,
        layer_scalar="layer_output_scale.weight",
        altup=None if names.altup is None else _ALTUP,
    )


def _latent(names: LatentNames) -> LatentNames:
    return _LATENT if names.index is None else replace(_LATENT, index=_INDEX)


def _selective(names: SelectiveNames) -> SelectiveNames:
    return _SELECTIVE if names.norms is None else replace(_SELECTIVE, norms=_STEP_NORMS)


def _delta_net(names: DeltaNetNames) -> DeltaNetNames:
    """Return the names of a gated delta net. Qwen 3 Next's stay in the order of its key heads."""
    if names.decay is not None:
        return _CHANNEL_DELTA_NET
    is_grouped = len(names.rates) == 1
    return DeltaNetNames(
        inputs=("attn_qkv", "attn_gate"),
        rates=("ssm_ba",) if is_grouped else ("ssm_beta", "ssm_alpha"),
        convolution=("ssm_conv1d.weight",),
        a_log="ssm_a",
        has_rates=True,
        dt_bias="ssm_dt.bias",
        norm="ssm_norm.weight",
        output="ssm_out",
        tiles_values=not is_grouped,
    )
