"""MobileNet-V5, the vision tower of Gemma 3n, with timm's names of parameters.

timm itself needs torchvision, whose wheels on PyPI do not load beside a torch without CUDA.
Source: timm's `mobilenetv5_300m_enc`.
"""

from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MobileNetV5"]

_STEM = 64
_WIDTHS = (128, 256, 640, 1280)
"""Number of channels of each stage"""
_EPSILON = 1e-6


class MobileNetV5(nn.Module):
    """Four stages of convolutions and attention; the outputs of the last two are fused."""

    def __init__(self, out_width: int, out_edge: int, multiplier: float = 1.0) -> None:
        """Make a tower without weights.

        out_width: number of channels of the features. out_edge: number of their rows and columns.
        multiplier: factor of the channels inside, at most 1.
        """
        super().__init__()
        first, second, third, fourth = (_rounded(width * multiplier) for width in _WIDTHS)
        self.out_edge = out_edge
        self.conv_stem = _ConvolutionNorm(3, _STEM, 3, stride=2, bias=True)
        self.blocks = nn.ModuleList(
            nn.Sequential(*stage)
            for stage in (
                (_EdgeResidual(_STEM, first, 2), *(_EdgeResidual(first, first) for _ in range(2))),
                (
                    _InvertedResidual(first, second, 6, start=3, middle=5),
                    *(_InvertedResidual(second, second, 4, start=edge) for edge in (5, 3, 5, 3)),
                ),
                (
                    _InvertedResidual(second, third, 6, start=5, middle=5),
                    *(_InvertedResidual(third, third, 4, start=5) for _ in range(7)),
                    _InvertedResidual(third, third, 1),
                    *_attention_pairs(third, 14, heads=12, head_width=64, key_stride=2),
                ),
                (
                    _InvertedResidual(third, fourth, 6, start=5, middle=5),
                    *_attention_pairs(fourth, 19, heads=16, head_width=96, key_stride=1),
                ),
            )
        )
        self.msfa = _Fusion(third + fourth, out_width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features [images, out_width, out_edge, out_edge].

        pixels: [images, 3, rows, columns], from 0 to 1.
        """
        hidden = self.conv_stem(pixels)
        outputs = []
        for stage in self.blocks:
            hidden = stage(hidden)
            outputs.append(hidden)
        fine: Tensor = self.msfa(*outputs[-2:], self.out_edge)
        return fine


class _Norm(nn.Module):
    """RMSNorm over the channels, with a GELU behind it if `activates`."""

    def __init__(self, channels: int, *, activates: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.activates = activates

    def forward(self, hidden: Tensor) -> Tensor:
        square = hidden.square().mean(1, keepdim=True)
        normed = hidden * (square + _EPSILON).rsqrt() * self.weight.view(1, -1, 1, 1)
        return functional.gelu(normed, approximate="tanh") if self.activates else normed


class _Convolution(nn.Conv2d):
    """Convolution whose output has 1 / stride of the input's rows and columns, rounded up."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        edge: int = 1,
        *,
        stride: int = 1,
        is_depthwise: bool = False,
        bias: bool = False,
    ) -> None:
        groups = inputs if is_depthwise else 1
        super().__init__(inputs, outputs, edge, stride, groups=groups, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, columns = (
            max((ceil(size / stride) - 1) * stride + edge - size, 0)
            for size, edge, stride in zip(
                hidden.shape[-2:], self.kernel_size, self.stride, strict=True
            )
        )
        left, top = columns // 2, rows // 2
        padded = functional.pad(hidden, (left, columns - left, top, rows - top))
        return super().forward(padded)


class _ConvolutionNorm(nn.Module):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        edge: int = 1,
        *,
        stride: int = 1,
        is_depthwise: bool = False,
        bias: bool = False,
        activates: bool = True,
    ) -> None:
        super().__init__()
        self.conv = _Convolution(
            inputs, outputs, edge, stride=stride, is_depthwise=is_depthwise, bias=bias
        )
        self.bn = _Norm(outputs, activates=activates)

    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.bn(self.conv(hidden))
        return normed


class _EdgeResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        inner = _rounded(inputs * 4)
        self.conv_exp = _Convolution(inputs, inner, 3, stride=stride)
        self.bn1 = _Norm(inner, activates=True)
        self.conv_pwl = _Convolution(inner, outputs)
        self.bn2 = _Norm(outputs)
        self.is_residual = stride == 1

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv_pwl(self.bn1(self.conv_exp(hidden))))
        return out + hidden if self.is_residual else out


class _LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gamma.view(1, -1, 1, 1)


class _InvertedResidual(nn.Module):
    """Depthwise convolutions in front of and within two products, with a wider middle.

    It halves rows and columns if it has a convolution in the middle.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        expansion: int,
        *,
        start: int = 0,
        middle: int = 0,
        is_scaled: bool = True,
    ) -> None:
        """start, middle: edges of the depthwise convolutions; 0 = no such convolution."""
        super().__init__()
        inner = _rounded(inputs * expansion)
        self.dw_start: nn.Module = nn.Identity()
        if start:
            self.dw_start = _ConvolutionNorm(
                inputs, inputs, start, is_depthwise=True, activates=False
            )
        self.pw_exp = _ConvolutionNorm(inputs, inner)
        self.dw_mid: nn.Module = nn.Identity()
        if middle:
            self.dw_mid = _ConvolutionNorm(inner, inner, middle, stride=2, is_depthwise=True)
        self.pw_proj = _ConvolutionNorm(inner, outputs, activates=False)
        self.layer_scale = _LayerScale(outputs) if is_scaled else nn.Identity()
        self.is_residual = is_scaled and not middle

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.dw_mid(self.pw_exp(self.dw_start(hidden)))
        out: Tensor = self.layer_scale(self.pw_proj(inner))
        return out + hidden if self.is_residual else out


class _Projection(nn.Sequential):
    """Product over the channels, for every `stride`-th row and column."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        if stride > 1:
            convolution = _Convolution(inputs, inputs, 3, stride=stride, is_depthwise=True)
            self.add_module("down_conv", convolution)
            self.add_module("norm", _Norm(inputs))
        self.add_module("proj", _Convolution(inputs, outputs))


class _MultiQueryAttention(nn.Module):
    """Attention of every pixel to every `key_stride`-th; all heads share keys and values."""

    def __init__(self, channels: int, heads: int, head_width: int, key_stride: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = _Projection(channels, heads * head_width)
        self.key = _Projection(channels, head_width, key_stride)
        self.value = _Projection(channels, head_width, key_stride)
        self.output = _Projection(heads * head_width, channels)

    def forward(self, hidden: Tensor) -> Tensor:
        images, _, rows, columns = hidden.shape
        query = self.query(hidden).view(images, self.heads, -1, rows * columns).mT
        key, value = (
            part(hidden).flatten(2).mT[:, None].expand(-1, self.heads, -1, -1)
            for part in (self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.output(mixed.mT.reshape(images, -1, rows, columns))
        return out


class _AttentionBlock(nn.Module):
    def __init__(self, channels: int, heads: int, head_width: int, key_stride: int) -> None:
        super().__init__()
        self.norm = _Norm(channels)
        self.attn = _MultiQueryAttention(channels, heads, head_width, key_stride)
        self.layer_scale = _LayerScale(channels)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layer_scale(self.attn(self.norm(hidden)))
        return out + hidden


class _Fusion(nn.Module):
    """Products over the channels of two stages, at the resolution of the first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.ffn = _InvertedResidual(inputs, outputs, 2, is_scaled=False)
        self.norm = _Norm(outputs)

    def forward(self, fine: Tensor, coarse: Tensor, edge: int) -> Tensor:
        size = fine.shape[-2:]
        hidden = self.ffn(torch.cat((fine, functional.interpolate(coarse, size)), 1))
        if any(each % edge for each in size):
            hidden = functional.interpolate(hidden, (edge, edge), mode="bilinear")
        else:
            hidden = functional.avg_pool2d(hidden, (size[0] // edge, size[1] // edge))
        normed: Tensor = self.norm(hidden)
        return normed


def _attention_pairs(
    channels: int, count: int, *, heads: int, head_width: int, key_stride: int
) -> list[nn.Module]:
    """Return blocks of attention, each with an inverted residual behind it."""
    return [
        block
        for _ in range(count)
        for block in (
            _AttentionBlock(channels, heads, head_width, key_stride),
            _InvertedResidual(channels, channels, 2),
        )
    ]


def _rounded(channels: float) -> int:
    """Return the nearest multiple of 8 that is not below 9/10 of `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
