"""Supported decoders with a block whose weights several depths share: a row for each."""

from services.engine.model.checkpoint.family import (
    Family,
    SharedBlockNames,
    TensorNames,
)
from services.engine.model.checkpoint.recurrent_names import (
    MambaNames,
    SelectiveNames,
)

__all__ = ["ZAMBA_FAMILIES"]


_ZAMBA = Family(
    "ZambaForCausalLM",
    names=TensorNames(
        final_norm="final_layernorm",
        feed_forward_norm="pre_ff_layernorm",
        gate=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        selective=SelectiveNames(by_head=True),
        shared_block=SharedBlockNames("shared_transf"),
        ignored=("*.shared_transf.*",),
    ),
    keys={"mamba_hidden_act": "hidden_mamba_act", "mamba_n_heads": "n_mamba_heads"},
    defaults={
        "attn_layer_offset": 4,
        "attn_layer_period": 6,
        "hidden_act": "gelu",
        "hidden_size": 3712,
        "intermediate_size": 14_848,
        "max_position_embeddings": 4096,
        "n_mamba_heads": 2,
        "num_attention_heads": 16,
        "num_hidden_layers": 76,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": 32_000,
    },
    reads_position_type=True,
)


_ZAMBA2 = Family(
    "Zamba2ForCausalLM",
    names=TensorNames(
        final_norm="final_layernorm",
        feed_forward_norm="pre_ff_layernorm",
        gate=("feed_forward.gate_up_proj",),
        down="feed_forward.down_proj",
        mamba=MambaNames(),
        shared_block=SharedBlockNames("shared_transformer", has_adapters=True),
        ignored=("*.shared_transformer.*",),
    ),
    keys={
        "mamba_d_head": "mamba_headdim",
        "mamba_n_groups": "mamba_ngroups",
        "mamba_n_heads": "n_mamba_heads",
        "mamba_proj_bias": "add_bias_linear",
        "mlp_bias": "add_bias_linear",
    },
    defaults={
        "adapter_rank": 128,
        "hidden_act": "gelu",
        "hidden_size": 2560,
        "mamba_d_state": 64,
        "mamba_expand": 2,
        "max_position_embeddings": 4096,
        "mixer_rms_eps": 1e-5,
        "n_mamba_heads": 8,
        "num_attention_heads": 32,
        "num_hidden_layers": 54,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "time_step_min": 0.001,
        "vocab_size": 32_000,
    },
    inner_factor=4,
    reads_mlp_bias=True,
    reads_position_type=True,
)

ZAMBA_FAMILIES: tuple[Family, ...] = (_ZAMBA, _ZAMBA2)
