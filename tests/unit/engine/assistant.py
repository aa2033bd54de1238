"""Gemma 4 with an assistant, both with random weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)

from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint

VOCABULARY = 96
UNIFIED = "gemma4 unified"
_WITHOUT_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_CLASSES: tuple[Any, Any, Any] = (
    Gemma4TextConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
)
_UNIFIED_CLASSES: tuple[Any, Any, Any] = (
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)


def target_config(family: str) -> Gemma4TextConfig | Gemma4UnifiedTextConfig:
    """Return the config of a Gemma 4 whose number of ids clusters divide."""
    values = CONFIGS[family].to_dict()
    sizes = {"vocab_size": VOCABULARY}
    if family == UNIFIED:
        return Gemma4UnifiedTextConfig(**{**values, **sizes})
    return Gemma4TextConfig(**{**values, **sizes, "vocab_size_per_layer_input": VOCABULARY})


def make_target(directory: Path, family: str = "gemma4, shared keys") -> PreTrainedModel:
    """Write a Gemma 4."""
    return make_checkpoint(directory, target_config(family))


def make_assistant(
    directory: Path,
    family: str = "gemma4, shared keys",
    *,
    ordered: bool = False,
    backbone: int = 0,
    vocabulary: int = 0,
    head_dim: int = 0,
) -> PreTrainedModel:
    """Write an assistant for a target of `make_target`.

    ordered: it computes the logits of some clusters of ids. backbone, vocabulary, head_dim: values
    in place of the target's.
    """
    target = target_config(family)
    kinds = list(target.layer_types or ())
    narrow = target.per_layer_config[kinds.index("sliding_attention")]
    full = target.per_layer_config[kinds.index("full_attention")]
    is_unified = family == UNIFIED
    text_config, whole_config, kind = _UNIFIED_CLASSES if is_unified else _CLASSES
    text = text_config(
        vocab_size=vocabulary or target.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_kv_shared_layers=3,
        num_attention_heads=2 * narrow.num_key_value_heads,
        num_key_value_heads=narrow.num_key_value_heads,
        head_dim=head_dim or narrow.head_dim,
        global_head_dim=full.head_dim,
        num_global_key_value_heads=full.num_key_value_heads,
        attention_k_eq_v=target.attention_k_eq_v,
        sliding_window=target.sliding_window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=target.max_position_embeddings,
        initializer_range=0.1,
        **{} if is_unified else _WITHOUT_INPUTS,
    )
    config = whole_config(
        text_config=text,
        backbone_hidden_size=backbone or target.hidden_size,
        use_ordered_embeddings=ordered,
        num_centroids=8,
        centroid_intermediate_top_k=3,
    )
    torch.manual_seed(9)
    config._attn_implementation = "eager"
    model: PreTrainedModel = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif not parameter.any():
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
    model.eval().save_pretrained(directory)  # type: ignore[no-untyped-call]
    return model


@torch.no_grad()
def expected_logits(target: Any, assistant: Any, before: Tensor, tokens: Tensor) -> Tensor:
    """Return transformers' logits of draft tokens, which all read the same keys and values.

    before: ids before the newest token. tokens: the newest token, and draft tokens behind it.
    """
    seen = target(
        before[None], output_hidden_states=True, return_shared_kv_states=True, use_cache=False
    )
    window = target.config.sliding_window - 1  # the newest token is in the window, too
    pages = {
        kind: tuple(part[:, :, -window:] if kind == "sliding_attention" else part for part in parts)
        for kind, parts in seen.shared_kv_states.items()
    }
    states, logits = seen.hidden_states[-1][:, -1:], []
    for token in tokens:
        embedded = target.get_input_embeddings()(token[None, None])
        out = assistant(
            inputs_embeds=torch.cat((embedded, states), dim=-1),
            position_ids=torch.tensor([[len(before)]]),
            shared_kv_states=pages,
            use_cache=False,
        )
        states = out.last_hidden_state
        logits.append(out.logits[0, 0])
    return torch.stack(logits)
