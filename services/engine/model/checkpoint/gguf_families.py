"""Families as GGUF files store them: other tensor names, and less left to do at loading."""

from dataclasses import replace

from services.engine.model.checkpoint.family import ExpertTensorNames, Family, TensorNames

__all__ = ["gguf_family"]

_INTERLEAVED = {
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "GraniteForCausalLM",
    "SmolLM3ForCausalLM",
}
"""Families whose queries and keys llama.cpp reorders for its own RoPE"""
_IGNORED = ("rope_freqs.weight", "rope_factors_*.weight", "*.attn_rot_embd")


def gguf_family(family: Family) -> Family:
    """Return a family with the names and conventions of GGUF.

    The converter of llama.cpp has added the 1 to Gemma's norms, transposed GPT-2's weights, and
    taken gpt-oss's experts apart.
    """
    return replace(
        family,
        names=_names(family.names),
        norm_offset=False,
        transposed=False,
        interleaved_rotary=family.architecture in _INTERLEAVED,
    )


def _names(names: TensorNames) -> TensorNames:
    is_gpt_oss = names.sinks is not None
    feed_forward_norm = None if names.feed_forward_norm is None else "ffn_norm"
    experts = None
    if names.experts is not None:
        experts = ExpertTensorNames(
            router="ffn_gate_inp",
            gate=("ffn_gate_exps.{}", "ffn_up_exps.{}"),
            down="ffn_down_exps.{}",
        )
    return TensorNames(
        roots={"": "output"},
        embedding="token_embd",
        positions=None if names.positions is None else "position_embd",
        layers="blk",
        final_norm="output_norm",
        attention_norm=None if names.attention_norm is None else "attn_norm",
        qkv=("attn_qkv",) if len(names.qkv) == 1 else ("attn_q", "attn_k", "attn_v"),
        query_norm="attn_q_norm",
        key_norm="attn_k_norm",
        sinks="attn_sinks.weight" if is_gpt_oss else None,
        output="attn_output",
        attention_post_norm=None if names.attention_post_norm is None else "post_attention_norm",
        feed_forward_norm="post_attention_norm" if is_gpt_oss else feed_forward_norm,
        gate=("ffn_up",) if len(names.gate) == 1 else ("ffn_gate", "ffn_up"),
        down="ffn_down",
        feed_forward_post_norm=None if names.feed_forward_post_norm is None else "post_ffw_norm",
        experts=experts,
        ignored=_IGNORED,
    )
