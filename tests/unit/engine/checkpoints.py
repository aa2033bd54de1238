"""Small random checkpoints made by transformers, and a driver that runs them step by step."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from services.engine.batch import StepBatch
from services.engine.model.decoder import Decoder

VOCABULARY = 97

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "llama, tied": LlamaConfig(**_SHAPE | {"tie_word_embeddings": True}),
    "llama, biases": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama, a key head each": LlamaConfig(**_SHAPE | {"num_key_value_heads": 4}),
    "llama, wide heads": LlamaConfig(**_SHAPE, head_dim=32),
    "llama, llama3 rope": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "llama, linear rope": LlamaConfig(**_SHAPE, rope_parameters=_LINEAR),
    "llama, dynamic rope": LlamaConfig(**_SHAPE, rope_parameters=_DYNAMIC),
    "llama, yarn rope": LlamaConfig(**_SHAPE, rope_parameters=_YARN),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "mistral, window": MistralConfig(**_SHAPE, sliding_window=11),
    "qwen2, tied": Qwen2Config(**_SHAPE | {"tie_word_embeddings": True}),
    "qwen2, some windows": Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32),
    "qwen3, tied": Qwen3Config(**_SHAPE | {"tie_word_embeddings": True}, head_dim=32),
}


def make_checkpoint(
    directory: Path, config: PreTrainedConfig, *, shard: str = "1GB"
) -> PreTrainedModel:
    """Saves a random model, its norms and biases random too; returns it as the reference."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.eval().save_pretrained(directory, max_shard_size=shard)
    return model


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[len(tokens), vocabulary] by transformers, all at once."""
    logits: Tensor = model(tokens[None]).logits[0]
    return logits


class Driver:
    """Feeds sequences to a decoder in chunks, through blocks that lie in no order."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Tensor], block_size: int = 32) -> None:
        self._decoder = decoder
        self._sequences = sequences
        self._size = block_size
        needed = [-(-len(tokens) // block_size) for tokens in sequences]
        generator = torch.Generator().manual_seed(11)
        shuffled = torch.randperm(sum(needed) + 3, generator=generator).to(torch.int32)
        self._tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
        for index, count in enumerate(needed):
            first = sum(needed[:index])
            self._tables[index, :count] = shuffled[first : first + count]
        self._cache = decoder.allocate_cache(len(shuffled), block_size)
        self._done = [0] * len(sequences)
        self.logits = [torch.empty(0, decoder.spec.vocab_size) for _ in sequences]
        """What was computed so far, [tokens, vocabulary] for each sequence"""

    def step(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Runs one batch of (sequence, number of its next tokens), decodes first."""
        batch = self._batch(chunks)
        hidden = self._decoder.forward(batch, self._cache)
        logits = self._decoder.logits(hidden).split(batch.query_lengths_host)
        for (index, count), rows in zip(chunks, logits, strict=True):
            self._done[index] += count
            self.logits[index] = torch.cat((self.logits[index], rows))

    def _batch(self, chunks: Sequence[tuple[int, int]]) -> StepBatch:
        spans = [(i, self._done[i], self._done[i] + count) for i, count in chunks]
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        lengths = torch.tensor([count for _, count in chunks])
        rows = torch.tensor([index for index, _ in chunks])
        tables = self._tables[rows]
        owners = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
        blocks = tables[owners, positions // self._size].long()
        contexts = [end for _, _, end in spans]
        return StepBatch(
            token_ids=torch.cat([self._sequences[i][start:end] for i, start, end in spans]),
            positions=positions,
            slots=blocks * self._size + positions % self._size,
            query_starts=torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32),
            context_lengths=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            num_decodes=_leading_ones(lengths.tolist()),
            query_lengths_host=tuple(lengths.tolist()),
            context_lengths_host=tuple(contexts),
        )


def _leading_ones(lengths: list[int]) -> int:
    return next((i for i, length in enumerate(lengths) if length != 1), len(lengths))


def random_tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator)
