"""Training of an EAGLE-3 head: one layer that drafts tokens from a model's hidden states.

Li, Wei, Zhang, Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (2025). The head reads the embedding of the newest token and three hidden states
of the model behind the token before it. From the second drafted token on, its own output stands for
these states, as it does in training. It is written in the published format.

    python draft_head.py --checkpoint ../tokenwire-code-6m --shards decay-512 --out head
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model import CausalModel, Decoder, FeedForward, ModelShape, Norm, rotate
from optimizer import Muon
from train import read_rows

SEED = 1
WARMUP_STEPS = 30
GRADIENT_NORM = 1.0
LAYERS = (1, 3, 4)
"""Layers of the model whose inputs the head reads"""
DEPTH_WEIGHT = 0.8
"""Weight of a drafted token in the loss, relative to that of the one before it"""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head. The hidden size, the heads and the positions are those of the model."""

    vocab: int = 1024
    """Number of the model's tokens that the head can draft"""
    feed_forward: int = 256


class Attention(nn.Module):
    """Grouped-query attention over the tokens, and over the drafted ones behind each of them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        keys = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the outputs [batch, length, hidden], and append the keys and values to `earlier`.

        x: [batch, length, 2 * hidden], for each token the drafted one at a depth. earlier: keys and
        values of the depths before, [batch, heads, length, dim].
        """
        s = self.shape
        q = rotate(self._heads(x, self.q_proj), cos, sin).transpose(1, 2)
        k = rotate(self._heads(x, self.k_proj), cos, sin).transpose(1, 2)
        v = self._heads(x, self.v_proj).transpose(1, 2)
        group = s.heads // s.kv_heads
        earlier.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        (keys, values), *drafted = earlier
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ keys.mT).float().masked_fill(future, -torch.inf)
        own = [(q * key).sum(-1, keepdim=True).float() for key, _ in drafted]
        weights = (torch.cat([scores, *own], -1) * s.head_dim**-0.5).softmax(-1).to(x.dtype)
        y = weights[..., :length] @ values
        for depth, (_, value) in enumerate(drafted):
            y = y + weights[..., length + depth, None] * value
        return F.linear(y.transpose(1, 2).flatten(2), self.o_proj.weight.to(x.dtype))

    def _heads(self, x: Tensor, projection: nn.Linear) -> Tensor:
        y: Tensor = F.linear(x, projection.weight.to(x.dtype))
        return y.view(*y.shape[:2], -1, self.shape.head_dim)


class Layer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, shape: ModelShape, head: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.hidden_norm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = FeedForward(ModelShape(hidden=shape.hidden, feed_forward=head.feed_forward))

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        earlier: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(x, cos, sin, earlier)
        y: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return y


class DraftHead(nn.Module):
    """EAGLE-3 head; the names of its parameters are those of the published format."""

    def __init__(self, shape: ModelShape, head: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(LAYERS) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Layer(shape, head)
        self.norm = Norm(shape)
        self.lm_head = nn.Linear(shape.hidden, head.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.006 if is_output else parameter.shape[1] ** -0.5)

    def draft(
        self, decoder: Decoder, ids: Tensor, states: Tensor, depth: int, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Yield the logits [batch, length - depth, vocab] of each drafted token.

        ids: [batch, length], the tokens behind those of `states`; states: [batch, length, 3 *
        hidden]. The tokens that stand in `ids` are taken as drafted.
        """
        count = ids.shape[1] - depth
        hidden = F.linear(states[:, :count], self.fc.weight.to(dtype))
        earlier: list[tuple[Tensor, Tensor]] = []
        for step in range(depth):
            places = slice(step, step + count)
            cos, sin = decoder.get_buffer("cos")[places], decoder.get_buffer("sin")[places]
            embedded = F.embedding(ids[:, places], decoder.embed_tokens.weight).to(dtype)
            hidden = self.midlayer(embedded, hidden, cos, sin, earlier)
            yield F.linear(self.norm(hidden), self.lm_head.weight.to(dtype))


@torch.no_grad()
def read_states(decoder: Decoder, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the states that the head reads [batch, length, 3 * hidden], and the model's logits."""
    length = ids.shape[1]
    cos, sin = decoder.get_buffer("cos")[:length], decoder.get_buffer("sin")[:length]
    x = F.embedding(ids, decoder.embed_tokens.weight).to(dtype)
    states = []
    for index, layer in enumerate(decoder.layers):
        if index in LAYERS:
            states.append(x)
        x = layer(x, cos, sin)
    logits = F.linear(decoder.norm(x), decoder.embed_tokens.weight.to(dtype))
    return torch.cat(states, -1), logits


def measure(
    model: CausalModel,
    head: DraftHead,
    tokens: Tensor,
    rows: Tensor,
    depth: int,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of rows [batch, length], and for each depth whether the drafts are right.

    tokens: [vocab], the model's ids of the head's tokens. A draft is right if it is the model's
    most likely token.
    """
    ids, dtype = rows[:, 1:], torch.bfloat16
    states, logits = read_states(model.model, rows, dtype)
    total, right = torch.zeros(()), []
    place = torch.full((model.model.shape.vocab,), -1)
    place[tokens] = torch.arange(len(tokens))
    drafts = head.draft(model.model, ids[:, :-1], states[:, :-2], depth, dtype)
    for step, drafted in enumerate(drafts):
        wanted = logits[:, step + 1 : step + 1 + drafted.shape[1]]
        likely = place[wanted.argmax(-1)]
        shares = wanted[..., tokens].float().softmax(-1)
        losses = -(shares * drafted.float().log_softmax(-1)).sum(-1)
        known = likely >= 0
        total = total + DEPTH_WEIGHT**step * (losses * known).sum() / known.sum()
        right.append(drafted.argmax(-1) == likely)
    return total, right


def accepted(right: Sequence[Tensor]) -> list[float]:
    """Return for each depth how often all drafts up to it are right."""
    all_right = torch.ones_like(right[0])
    shares = []
    for each in right:
        all_right = all_right & each
        shares.append(round(all_right.float().mean().item(), 4))
    return shares


def choose_tokens(folder: Path, count: int, vocab: int) -> Tensor:
    """Return the `count` most frequent ids of the shards, in their order."""
    rows = np.concatenate([np.load(path) for path in sorted(folder.glob("shard-???.npy"))])
    frequencies = np.bincount(rows.reshape(-1).astype(np.int64), minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-frequencies, kind="stable")[:count]))


def write_head(head: DraftHead, tokens: Tensor, folder: Path) -> None:
    """Write weights and configuration in the published format of EAGLE-3."""
    shape = head.shape
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.bfloat16().contiguous() for name, value in head.state_dict().items()}
    known = torch.zeros(shape.vocab, dtype=torch.bool)
    known[tokens] = True
    offsets = tokens - torch.arange(len(tokens))
    save_file({**weights, "d2t": offsets, "t2d": known}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "draft_vocab_size": len(tokens),
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "intermediate_size": head.midlayer.mlp.gate_proj.out_features,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # the format counts the layers whose outputs are read
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS]},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(arguments: argparse.Namespace) -> None:
    """Train a head and write it."""
    torch.manual_seed(SEED)
    torch.set_num_threads(arguments.threads)
    model = CausalModel(ModelShape()).requires_grad_(False)
    model.load_state_dict(load_file(arguments.checkpoint / "model.safetensors"))
    shape = model.model.shape
    tokens = choose_tokens(arguments.shards, arguments.vocab, shape.vocab)
    head = DraftHead(shape, HeadShape(arguments.vocab, arguments.feed_forward))
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in name]
    others = [p for name, p in head.named_parameters() if p.ndim != 2 or "lm_head" in name]
    optimizers = [
        Muon(matrices, lr=arguments.matrix_lr),
        torch.optim.AdamW(others, lr=arguments.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    rows = read_rows(arguments.shards, 0)
    held_out = torch.stack([next(rows) for _ in range(arguments.rows)])
    began = time.monotonic()
    for step in range(arguments.steps):
        factor = min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - step / arguments.steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.zero_grad()
        batch = torch.stack([next(rows) for _ in range(arguments.rows)])
        batch = batch.reshape(-1, arguments.piece)
        loss, right = measure(model, head, tokens, batch, arguments.depth)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
        line = {"step": step + 1, "loss": round(loss.item(), 4), "accepted": accepted(right)}
        print(json.dumps({**line, "seconds": round(time.monotonic() - began)}), flush=True)
        if (step + 1) % arguments.write_steps == 0 or step + 1 == arguments.steps:
            write_head(head, tokens, arguments.out)
    with torch.no_grad():
        _, right = measure(model, head, tokens, held_out, arguments.depth)
    print(json.dumps({"held_out": accepted(right)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="exported folder")
    parser.add_argument("--shards", type=Path, required=True, help="folder of samples.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--steps", type=int, default=900, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=16, help="rows an optimizer step")
    parser.add_argument("--piece", type=int, default=128, help="tokens of the pieces of rows")
    parser.add_argument("--depth", type=int, default=3, help="drafted tokens of each position")
    parser.add_argument("--vocab", type=int, default=1024, help="tokens that the head can draft")
    parser.add_argument("--feed-forward", type=int, default=256, help="size of the inner layer")
    parser.add_argument("--matrix-lr", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument("--other-lr", type=float, default=0.003, help="peak learning rate of AdamW")
    parser.add_argument("--write-steps", type=int, default=100, help="steps between two writes")
    parser.add_argument("--threads", type=int, default=2, help="cores to use")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
