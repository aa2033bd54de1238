"""EAGLE-3 head: its inputs, and its loading in the published format.

Li, Wei, Zhang, Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (2025).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from services.common.json_values import Json
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import choose_backend
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.eagle_config import NUM_DEPTHS
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.tensors import Checkpoint, StoredTensor, TensorFiles
from services.engine.model.decoder import Decoder, DecoderWeights
from services.engine.model.draft_head import DraftHead, HeadInputs
from services.engine.model.embedding import Embedding, TensorEmbedding
from services.engine.model.layer_inputs import LayerRows
from services.engine.model.loader import choose_operators
from services.engine.model.manifest import StoredLayer
from services.engine.model.mixers.stored import stored_mixer
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import LayerNames, StoredNorm, stored_tensors
from services.engine.model.parts.stored_feed_forward import stored_feed_forward
from services.engine.model.parts.tensor_reader import TensorReader
from services.engine.model.residual import Residual, ResidualRows
from services.engine.model.weight_reader import WeightReader

__all__ = ["EagleHead", "load_eagle"]

_LAYERS = tuple(f"{root}{layer}." for root in ("", "model.") for layer in ("midlayer", "layers.0"))
"""Beginnings that the names of the layer's tensors may have"""


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head in memory."""

    model: DraftHead
    targets: Sequence[int]
    """Id of the engine's model for each id of the head; empty: the ids are the same"""


@dataclass(frozen=True, slots=True)
class JoinedResidual(Residual):
    """Residual of a layer whose mixer reads the normed embedding beside the normed residual."""

    def begin(self, rows: ResidualRows) -> Tensor:
        """Leave `hidden` as it is. Return [n, 2 * hidden_size]."""
        assert rows.joined is not None
        return rows.joined

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        """Leave `hidden` as the feed-forward layer has left it."""


@dataclass(frozen=True, slots=True)
class EagleInputs(HeadInputs):
    """Inputs of an EAGLE-3 head: one product makes its residual from several hidden states."""

    fusion: Projection
    """`width` → hidden_size"""
    width: int
    embedding_norm: Tensor
    states_norm: Tensor
    epsilon: float
    operators: Operators

    def fill(self, embedded: Tensor, states: Tensor, rows: ResidualRows, *, is_own: bool) -> None:
        assert rows.joined is not None
        if is_own:
            rows.hidden.copy_(states)
        else:
            arranged = self.operators.temporary(*states.shape)
            self.operators.arrange(states.contiguous(), arranged)
            self.fusion.into(arranged, rows.hidden)
        parts = (embedded, self.embedding_norm), (rows.hidden, self.states_norm)
        normed = [rms_norm(part, weight.shape, weight, self.epsilon) for part, weight in parts]
        torch.cat(normed, dim=1, out=rows.joined)

    def following(self, hidden: Tensor) -> Tensor:
        return hidden.clone()


def load_eagle(directory: Path, target: Decoder, kv_dtype: str) -> EagleHead:
    """Load the head in `directory`, which shares the embeddings of `target` unless it has its own.

    Raises CheckpointError for a head that does not fit `target`, before anything is loaded.
    """
    config = Checkpoint.config(directory)
    spec = _spec(config, target.spec)
    operators = choose_operators(spec, target.dtype, target.device, "full")
    tiled = isinstance(operators, TiledOperators)
    attention = choose_backend(spec, target.dtype, target.device, tiled=tiled, kv_dtype=kv_dtype)
    with Checkpoint(directory) as files:
        stored = _StoredHead.of(spec, files, target.spec, alone=target.runs_alone)
        total = files.require(stored_tensors(stored), ("t2d", "*embed_tokens.weight"))
        bar = LoadProgress(total, shown=False)
        reader = TensorReader(files, spec, target.dtype, target.device, operators, bar, Shard())
        layer = WeightReader(reader).layer(stored.layer, spec.layers[0])
        fusion = reader.projection(
            [reader.weight(stored.fusion, None)],
            None if stored.fusion_bias is None else reader.tensor(stored.fusion_bias),
            operators,
        )
        inputs = EagleInputs(
            fusion,
            NUM_DEPTHS * target.spec.hidden_size,
            reader.norm_weight(reader.tensor(stored.embedding_norm.weight)),
            reader.norm_weight(reader.tensor(stored.states_norm.weight)),
            spec.norm_epsilon,
            operators,
        )
        output = target.output
        if stored.output is not None:
            output = reader.projection(
                [reader.weight(stored.output, None)], None, operators.for_logits()
            )
        weights = DecoderWeights(
            embedding=_embedding(reader, stored, target),
            positions=None,
            layers=(replace(layer, residual=JoinedResidual()),),
            final_norm=reader.norm_weight(reader.tensor(stored.final_norm.weight)),
            output=output,
            device=target.device,
            step_bytes=reader.step_bytes,
            layer_inputs=None,
            tokens=None,
        )
        targets = _targets(files, stored, target.spec.vocab_size)
    return EagleHead(DraftHead(spec, target.dtype, weights, operators, attention, inputs), targets)


@dataclass(frozen=True, slots=True)
class _StoredHead:
    """Tensors of a head."""

    fusion: StoredTensor
    fusion_bias: StoredTensor | None
    embedding_norm: StoredNorm
    states_norm: StoredNorm
    layer: StoredLayer
    final_norm: StoredNorm
    output: StoredTensor | None
    """Output projection; None: that of the engine's model"""
    embedding: StoredTensor | None
    """Embeddings; None: those of the engine's model"""
    targets: StoredTensor | None
    """Difference between the id of the engine's model and the head's id, by the latter"""

    @staticmethod
    def of(spec: ModelSpec, files: TensorFiles, target: ModelSpec, *, alone: bool) -> "_StoredHead":
        """List the tensors. Raises CheckpointError for a head that does not fit `target`.

        alone: whether one rank has the whole model.
        """
        own = spec.family.names
        held = (each for each in _LAYERS if files.holds(f"{each}{own.output}.weight"))
        prefix = next(held, _LAYERS[0])
        root = "model." if prefix.startswith("model.") else ""
        names, layer = LayerNames(spec, prefix), spec.layers[0]
        width, hidden = target.hidden_size, spec.hidden_size
        table = f"{root}embed_tokens.weight"
        if not files.holds(table) and hidden != width:
            raise CheckpointError(
                f"the head has a width of {hidden} and no embeddings, and the model's have a width "
                f"of {width}. Use the head of this model."
            )
        fusion = f"{root}fc.weight"
        if files.holds(fusion):
            (_, inputs) = files.stored(fusion).shape
            if inputs != NUM_DEPTHS * width:
                raise CheckpointError(
                    f"the head reads hidden states of a width of {inputs // NUM_DEPTHS}, and the "
                    f"model's have {width}. Use the head of this model."
                )
        vocabulary = files.holds("lm_head.weight")
        if not vocabulary and not alone:
            raise CheckpointError(
                "the head has no lm_head.weight, and several ranks share the model's. Start one "
                "rank, or use a head with its own."
            )
        if not vocabulary and (spec.vocab_size, hidden) != (target.vocab_size, width):
            raise CheckpointError("no file holds the tensor lm_head.weight.")
        return _StoredHead(
            fusion=StoredTensor(fusion, (hidden, NUM_DEPTHS * width)),
            fusion_bias=StoredTensor(f"{root}fc.bias", (hidden,))
            if files.holds(f"{root}fc.bias")
            else None,
            embedding_norm=names.required_norm("input_layernorm"),
            states_norm=names.required_norm("hidden_norm"),
            layer=StoredLayer(
                mixer_norm=None,
                mixer=stored_mixer(names, layer.mixer),
                mixer_post_norm=None,
                feed_forward_norm=names.norm(own.feed_forward_norm),
                feed_forward=stored_feed_forward(names, layer.feed_forward),
                feed_forward_post_norm=None,
                input=None,
                scalar=None,
                altup=None,
                hyper=None,
                shared_block=None,
            ),
            final_norm=LayerNames(spec, root).required_norm("norm"),
            output=StoredTensor("lm_head.weight", (spec.vocab_size, hidden))
            if vocabulary
            else None,
            embedding=StoredTensor(table, (target.vocab_size, hidden))
            if files.holds(table)
            else None,
            targets=StoredTensor("d2t", (spec.vocab_size,), ("I64", "I32"))
            if files.holds("d2t") or spec.vocab_size != target.vocab_size
            else None,
        )


def _spec(config: Config, target: ModelSpec) -> ModelSpec:
    """Return the shape of a head: that of a Llama whose attention reads two rows side by side."""
    if config.integer("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"{config.file}: EAGLE-3 heads of one layer are supported alone.")
    size = config.integer("draft_vocab_size", config.integer("vocab_size", target.vocab_size))
    values: dict[str, Json] = {
        **config.values,
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": size,
        "tie_word_embeddings": False,
        "num_hidden_layers": 1,
    }
    spec = ModelSpec.from_config(values, config.file)
    (layer,) = spec.layers
    assert isinstance(layer.mixer, AttentionSpec)
    mixer = replace(layer.mixer, input_width=2 * spec.hidden_size)
    return replace(
        spec, layers=(replace(layer, mixer=mixer),), context_length=target.context_length
    )


def _embedding(reader: TensorReader, stored: _StoredHead, target: Decoder) -> Embedding:
    if stored.embedding is None:
        return target.embedding
    return TensorEmbedding(reader.tensor(stored.embedding).to(target.device, target.dtype))


def _targets(files: TensorFiles, stored: _StoredHead, size: int) -> Sequence[int]:
    """Return the id of the engine's model for each id of the head; empty if they are the same.

    size: number of ids of the engine's model.
    """
    if stored.targets is None:
        return ()
    offsets = files.tensor(stored.targets).long()
    targets = offsets + torch.arange(len(offsets))
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < size:
        raise CheckpointError(
            f"the tensor d2t names ids outside the model's {size:,}. Use the head of this model."
        )
    ids: list[int] = targets.tolist()
    return ids
