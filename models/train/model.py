"""Llama decoder for training: plain torch, fast on CPU cores with AMX.

Parameters are float32 and cast to the compute dtype on use, so one set of weights serves bfloat16
training and float32 checks. Parameter names are those of `LlamaForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

LOSS_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama decoder with tied embeddings."""

    vocab: int = 8192
    hidden: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 768
    context: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        batch, length, _ = x.shape
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(x.dtype)
        qkv = F.linear(x, weight).view(batch, length, s.heads + 2 * s.kv_heads, s.head_dim)
        q, k, v = torch.split(qkv, [s.heads, s.kv_heads, s.kv_heads], dim=2)
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return F.linear(y, self.o_proj.weight.to(x.dtype))


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.linear(x, self.gate_proj.weight.to(x.dtype))
        up = F.linear(x, self.up_proj.weight.to(x.dtype))
        return F.linear(F.silu(gate) * up, self.down_proj.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self.eps = shape.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (
            wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        ).to(x.dtype)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Decoder(nn.Module):
    """Decoder from token ids [batch, length] to final hidden states [batch, length, hidden]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context).float(), inverse)[:, None, :]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = F.embedding(ids, self.embed_tokens.weight).to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden: Tensor = self.norm(x)
        return hidden


class CausalModel(nn.Module):
    """A decoder with a tied output head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        self._initialize(shape)

    @torch.no_grad()
    def _initialize(self, shape: ModelShape) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(
                    parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5
                )

    def logits(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return logits [batch, length, vocab] for ids [batch, length]."""
        hidden = self.model(ids, dtype)
        return F.linear(hidden, self.model.embed_tokens.weight.to(dtype))

    def loss(self, ids: Tensor, targets: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the mean cross entropy in nats of targets [batch, length]."""
        hidden = self.model(ids, dtype).flatten(0, 1)
        loss: Tensor = _LinearCrossEntropy.apply(
            hidden, self.model.embed_tokens.weight, targets.flatten()
        )
        return loss

    def compile_parts(self) -> None:
        """Compile the layers, which share one function, and the loss gradient."""
        global _softmax_gradient
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        _softmax_gradient = torch.compile(_softmax_gradient, dynamic=False)


class _LinearCrossEntropy(torch.autograd.Function):
    """Output head and cross entropy in chunks, with gradients, so that no logits are kept."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        narrow = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float32)
        scale = 1.0 / len(targets)
        for start in range(0, len(targets), LOSS_CHUNK):
            part = slice(start, start + LOSS_CHUNK)
            logits = hidden[part] @ narrow.T
            loss, grad = _softmax_gradient(logits, targets[part], scale)
            total += loss
            grad_hidden[part] = grad @ narrow
            grad_weight += grad.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total * scale

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * upstream, grad_weight * upstream, None


def _softmax_gradient(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    log_probabilities = logits.float().log_softmax(-1)
    column = targets[:, None]
    loss = -log_probabilities.gather(1, column).sum()
    grad = log_probabilities.exp_()
    grad.scatter_add_(1, column, torch.full_like(column, -1.0, dtype=torch.float32))
    return loss, grad.mul_(scale).to(logits.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally from q [batch, length, heads, dim] to k, v [batch, length, kv_heads, dim].

    Returns [batch, length, heads * dim].
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [batch, length, heads, head_dim]; pairs are half a head apart."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
