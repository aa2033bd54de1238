"""Redirection of models that compute attention themselves to our attention function.

Modules older than transformers' attention interface multiply queries and keys in their forward
pass. Some kinds are known here by name. The modules keep their projections.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.model.transformers_code.alibi import AlibiAttention
from services.engine.model.transformers_code.calls import attend
from services.engine.model.transformers_code.positions import Positions

__all__ = ["has_biases", "lead_to_interface"]

_Forward = Callable[..., Any]


def has_biases(model: nn.Module) -> bool:
    """Return whether a model's attention adds biases to scores (ALiBi)."""
    return any(_kind(module) in _BIASED for module in model.modules())


def lead_to_interface(model: PreTrainedModel, positions: Positions) -> None:
    """Make all modules of a model that compute attention themselves call our attention."""
    biased = AlibiAttention.of(model.base_model, positions) if has_biases(model) else None
    for module in model.modules():
        name = _kind(module)
        if biased is not None and name in _BIASED:
            module.forward = functools.partial(_BIASED[name], biased, module)
        elif name in _PASSES:
            module.forward = functools.partial(_PASSES[name], module)
        elif name in _PRODUCTS:
            setattr(module, "_attn", functools.partial(_PRODUCTS[name], module))  # noqa: B010


def _bart(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    told = _named_arguments(module, args, kwargs)
    rows = told["hidden_states"]
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (_heads(each(rows), module.head_dim) for each in projections)
    mask = told["attention_mask"]
    out, _ = attend(module, query, key, value, mask, scaling=module.scaling)
    return module.out_proj(out.flatten(2)), None


def _bert(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    told = _named_arguments(module, args, kwargs)
    rows = told["hidden_states"]
    projections = (module.query, module.key, module.value)
    heads = [_heads(each(rows), module.attention_head_size) for each in projections]
    if (angles := told.get("sinusoidal_pos")) is not None:
        count = 3 if module.rotary_value else 2
        heads[:count] = module.apply_rotary_position_embeddings(angles, *heads[:count])
    query, key, value = heads
    out, _ = attend(module, query, key, value, told["attention_mask"])
    return out.flatten(2), None


def _gpt(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> list[Tensor]:
    assert module.scale
    out, _ = attend(module, query, key.transpose(2, 3), value)  # the mask is only for padding
    return [out.transpose(1, 2)]


def _neox(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, None]:
    out, _ = attend(module, query, key, value, mask)
    return out.transpose(1, 2), None


_PASSES: Mapping[str, _Forward] = {
    "modeling_big_bird.BigBirdSelfAttention": _bert,
    "modeling_megatron_bert.MegatronBertSelfAttention": _bert,
    "modeling_mvp.MvpAttention": _bart,
    "modeling_rembert.RemBertSelfAttention": _bert,
    "modeling_roformer.RoFormerSelfAttention": _bert,
    "modeling_trocr.TrOCRAttention": _bart,
    "modeling_xglm.XGLMAttention": _bart,
}
"""Forward passes, by the module's file and class"""
_PRODUCTS: Mapping[str, _Forward] = {
    "modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _neox,
    "modeling_openai.Attention": _gpt,
}
"""The parts of forward passes after the projections"""


_BIASED: Mapping[str, _Forward] = {
    "modeling_bloom.BloomAttention": AlibiAttention.bloom,
    "modeling_mpt.MptAttention": AlibiAttention.mpt,
}
"""Forward passes with linear biases"""


def _kind(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def _named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name; omitted ones are None."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _heads(rows: Tensor, width: int) -> Tensor:
    """Return [1, heads, tokens, width] for [1, tokens, heads * width]."""
    return rows.view(*rows.shape[:2], -1, width).transpose(1, 2)
