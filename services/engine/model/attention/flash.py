"""Flash attention of torch, of cuDNN, and of FlashAttention 3 and 4 where these are installed."""

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import attention

__all__ = ["attend_part", "attend_part_by_cudnn", "flash_attention", "use_newest_flash"]

_LOG = logging.getLogger("loop")
_RELEASES = (("FA3", "flash_attn_interface", (9,)), ("FA4", "flash_attn.cute", (9, 10)))
"""Names that torch has for releases of FlashAttention, their modules, and the major numbers of the
compute capabilities that they are made for, the preferred release first"""


def use_newest_flash(device: torch.device, check: Callable[[], None]) -> None:
    """Let torch's flash attention call FlashAttention 3 or 4, if a package of these is installed.

    It changes the operator for the whole process. check: calls the operator; if it raises an error,
    torch's own kernel stays in use.
    """
    major, _ = torch.cuda.get_device_capability(device)
    for name, module, majors in _RELEASES:
        if major not in majors or not _is_installed(module):
            continue
        try:
            attention.activate_flash_attention_impl(name)
            check()
        except Exception as error:  # an extension that does not fit this torch raises any error
            if attention.current_flash_attention_impl() is not None:
                attention.restore_flash_attention_impl()
            why = " ".join(str(error).split())[:200] or type(error).__name__
            _LOG.warning("%s is installed but not used: %s", module, why)
            continue
        _LOG.info("flash attention is that of %s", module)
        return


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that would contain it
        return False


def flash_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> Tensor:
    """Return causal attention of packed sequences over themselves, [tokens, heads, head_dim].

    queries: [tokens, heads, head_dim]; keys, values: [tokens, kv_heads, head_dim]; starts: int32
    [sequences + 1]. Unlike torch.nn.attention.varlen, its operator has taken windows and groups of
    heads in every release that xformers supports.
    """
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        starts,
        starts,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=window - 1 if window else -1,
        window_size_right=0,
    )[0]
    return attended


def attend_part(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return attention over a part of the keys, and the natural logarithms of its softmax sums.

    queries: [n, heads, head_dim]; keys, values: [tokens, kv_heads, head_dim]; the last dimension
    has no gaps. is_causal: query i sees the keys up to i; else it sees all. The results are
    contiguous [n, heads, head_dim] and float32 [heads, n].
    """
    if queries.device.type == "cpu":
        by_heads = (each.transpose(0, 1)[None] for each in (queries, keys, values))
        attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *by_heads, 0.0, is_causal, scale=scale
        )
        return attended[0].transpose(0, 1).contiguous(), sums[0].contiguous()
    attended, sums, *_ = torch.ops.aten._flash_attention_forward(
        queries[None],
        keys[None],
        values[None],
        None,
        None,
        len(queries),
        len(keys),
        0.0,
        is_causal,
        False,
        scale=scale,
    )
    return attended[0].contiguous(), sums[0].contiguous()


def attend_part_by_cudnn(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Do `attend_part` with cuDNN, which builds a plan at the first call for each shape."""
    by_heads = (each.contiguous().transpose(0, 1)[None] for each in (queries, keys, values))
    attended, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *by_heads, None, True, 0.0, is_causal, False, scale=scale
    )
    heads, count = queries.shape[1], len(queries)
    return attended[0].transpose(0, 1).contiguous(), sums.reshape(heads, count)
