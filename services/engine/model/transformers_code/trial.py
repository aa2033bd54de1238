"""A pass without numbers, which finds the arguments that each layer passes to attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionMaskInterface, PreTrainedModel

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.checkpoint.family import QkNorm
from services.engine.model.transformers_code.calls import (
    IMPLEMENTATION,
    TRIAL,
    AttentionCalls,
    connect,
)
from services.engine.model.transformers_code.positions import Positions
from services.engine.model.transformers_code.refusal import UnsupportedError

__all__ = ["TRIAL_TOKENS", "Trial", "try_pass"]

TRIAL_TOKENS = 7
_IGNORED = frozenset({"dropout", "layer_idx", "output_router_logits", "position_embeddings"})
"""Arguments of attention without an effect here"""
_READ = frozenset({"is_causal", "s_aux", "scaling", "sliding_window", "softcap"})


@dataclass(slots=True)
class Trial(AttentionCalls):
    """Calls of attention in a trial pass, in order."""

    layers: list[AttentionSpec] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        for name, value in arguments.items():
            passed = value is not None and value is not False
            if passed and name not in _READ and name not in _IGNORED and name != "position_ids":
                raise UnsupportedError(f"it passes {name} to attention")
        if queries.ndim != 4 or keys.shape[2] != TRIAL_TOKENS or queries.shape[2] != TRIAL_TOKENS:
            raise UnsupportedError("its queries are not those of the tokens whose keys it passes")
        if arguments.get("dropout"):
            raise UnsupportedError("it drops attention weights")
        heads, width, value_width = queries.shape[1], queries.shape[3], values.shape[3]
        scale = arguments.get("scaling")
        if scale is None:
            scale = width**-0.5
        self.layers.append(
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=keys.shape[1],
                head_dim=max(width, value_width),
                scale=_number("scaling", scale),
                cap=_number("softcap", arguments.get("softcap") or 0.0),
                window=_window(module, mask, arguments),
                rotary=None,
                qkv_bias=False,
                output_bias=False,
                has_sinks=_has_sinks(arguments.get("s_aux"), heads),
                qk_norm=QkNorm.NONE,
                gate=None,
            )
        )
        self.modules.append(module)
        return queries.new_empty(1, TRIAL_TOKENS, heads, value_width)


class _NothingFound(TorchFunctionMode):
    """Mode in which searches on "meta" find nothing, so that loops over experts are empty."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.nonzero, Tensor.nonzero):
            return torch.empty((0, args[0].ndim), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def try_pass(model: PreTrainedModel, positions: Positions) -> Trial:
    """Return the calls of attention in a pass of a model on the device "meta".

    Raises UnsupportedError for calls that are not supported.
    """
    trial = Trial()
    connect(model, trial)
    model.set_attn_implementation(TRIAL)
    ids = torch.zeros((1, TRIAL_TOKENS), dtype=torch.int64, device="meta")
    try:
        with _NothingFound():
            model.base_model(
                input_ids=ids,
                **positions.arguments(torch.empty_like(ids)),
                attention_mask=torch.empty_like(ids),
                use_cache=False,
            )
    except (UnsupportedError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(f"a trial pass failed ({_first_line(error)})") from error
    if not trial.layers:
        raise UnsupportedError("its attention does not go through transformers' interface")
    model.set_attn_implementation(IMPLEMENTATION)
    return trial


def _window(module: nn.Module, mask: Tensor | None, arguments: Mapping[str, Any]) -> int:
    """Return the number of tokens that a token sees; 0 = all before it."""
    if mask is None:
        causal = arguments.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        if not causal:
            raise UnsupportedError("its tokens see later tokens")
        return 0
    sight: int | str | None = None
    for tensor in (mask, mask._base):
        if sight is None and mask.shape[-2:] == (TRIAL_TOKENS, TRIAL_TOKENS):
            sight = getattr(tensor, "tokenwire_sight", None)
    if isinstance(sight, str):
        raise UnsupportedError(sight)
    if sight is not None:
        return sight
    raise UnsupportedError("it computes masks of its own")


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) or not isinstance(value, int | float):
        raise UnsupportedError(f"its {name} of attention is no number")
    return float(value)


def _has_sinks(sinks: Tensor | None, heads: int) -> bool:
    if sinks is not None and sinks.numel() != heads:
        raise UnsupportedError("it has other sinks of attention than one for each head")
    return sinks is not None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"


def _mask(
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    **_: Any,
) -> Tensor:
    """Return a mask that states which tokens a token sees, for a pass on the device "meta"."""
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    mask.tokenwire_sight = _sight(mask_function, local_size or 0)  # type: ignore[attr-defined]
    return mask


def _sight(mask_function: Callable[..., Tensor], window: int) -> int | str:
    """Return how many tokens a token sees, itself included, 0 = all before it; or the problem."""
    end = 2 * window + 8
    rows = sorted({0, 1, 5, end - 1, *(max(window + near, 0) for near in (-1, 0, 1))})
    queries = torch.tensor(rows)[:, None]
    keys = torch.arange(end)[None]
    visible = keys <= queries
    if window:
        visible &= keys > queries - window
    try:
        told = mask_function(0, 0, queries, keys)
        is_equal = torch.equal(torch.broadcast_to(torch.as_tensor(told), visible.shape), visible)
    except (IndexError, NotImplementedError, RuntimeError, TypeError):
        return "its masks depend on more than positions"
    if is_equal:
        return window
    return "its tokens see chunks" if window else "its tokens see later tokens"


AttentionMaskInterface.register(TRIAL, _mask)
