"""Vectors of whole texts from the hidden states of their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, softmax

from services.engine.batch.transfer import to_device
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.encoder_families import COLBERT, JINA_V5
from services.engine.model.checkpoint.family import HeadStage
from services.engine.model.checkpoint.sentence_modules import (
    DenseModule,
    Pooling,
    SentenceModules,
)
from services.engine.model.checkpoint.tensors import Checkpoint, StoredTensor, TensorFiles
from services.engine.model.lexical_head import LexicalHead
from services.engine.model.loader import open_tensors
from services.engine.model.token_heads import TokenHeads

__all__ = ["Pooler", "load_pooler"]

Stage: TypeAlias = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Stage] = {
    "identity": lambda rows: rows,
    "tanh": torch.tanh,
    "gelu": gelu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}
_CLASSES: dict[str, Stage] = {
    "multi_label_classification": torch.sigmoid,
    "regression": _ACTIVATIONS["identity"],
    "single_label_classification": partial(softmax, dim=1),
}
"""Stages that make the logits of several labels probabilities, by `problem_type`"""
_POOLING_KEY = "classifier_pooling"
_CLASSIFIER_POOLINGS = {
    "cls": Pooling.CLS,
    "bos": Pooling.CLS,
    "mean": Pooling.MEAN,
    "late": Pooling.MEAN,
    "last": Pooling.LAST,
}
"""Poolings by `classifier_pooling`; "late" poolings are of the logits of all tokens"""


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pooling, and the layers behind it, in float32."""

    pooling: Pooling
    stages: tuple[Stage, ...]
    last: Stage
    """Activation of the labels' logits, or the scaling of vectors to length 1"""
    width: int
    """Width of a text's vector; 0 if only tokens have vectors"""
    token_width: int
    """Width of a token's vector, which is its state if texts have vectors"""
    scores: bool
    """True if the vector holds the scores of the checkpoint's labels rather than an embedding"""
    normalizes: bool
    """True if vectors have length 1"""
    skips_instructions: bool = False
    """True if pooling leaves out the instruction at the beginning of a text"""
    lexical: LexicalHead | None = None
    """Head that makes the vectors of Pooling.LEXICAL; None for other poolings"""
    token_stages: tuple[Stage, ...] = ()
    """Layers between the states of tokens and their mean"""
    token_heads: TokenHeads | None = None
    """Heads of single tokens beside the vectors of texts; None: there are none"""

    def of_tokens(self, states: Tensor) -> Tensor:
        """Return the vectors that are pooled, float32 [tokens, n], for the states of tokens."""
        for stage in self.token_stages:
            states = stage(states)
        return states

    def finish(self, pooled: Tensor, raw: Sequence[bool]) -> Tensor:
        """Return the vectors for pooled hidden states, float32 [n, hidden_size].

        They are float32 [n, width], or those of tokens, [n, token_width], if only tokens have them.

        raw: for each vector, whether the last stage is left out.
        """
        for stage in self.stages:
            pooled = stage(pooled)
        if all(raw):
            return pooled
        finished = self.last(pooled)
        if not any(raw):
            return finished
        return torch.where(to_device(torch.tensor(raw), pooled.device)[:, None], pooled, finished)


def load_pooler(
    directory: Path, spec: ModelSpec, device: torch.device, wanted: str = "auto"
) -> Pooler | None:
    """Read the pooler of a checkpoint; None if the checkpoint only generates.

    wanted: "auto", or the pooling of a checkpoint that does not name its own. Raises
    CheckpointError.
    """
    if spec.num_labels:
        return _classifier(directory, spec, device)
    if spec.architecture == JINA_V5:  # its modules.json names code that the checkpoint brings
        modules: SentenceModules | None = SentenceModules(Pooling.LAST, normalizes=True)
    else:
        modules = SentenceModules.read(directory, None if wanted == "auto" else Pooling(wanted))
    if modules is None and spec.architecture == COLBERT:
        modules = _projected_tokens(directory)
    if modules is None and spec.is_encoder:
        modules = SentenceModules(Pooling.MEAN)  # the default of sentence-transformers
    if modules is None:
        return None
    if modules.lexical is not None:
        return _lexical(directory, spec, device, modules)
    if modules.pooling is Pooling.CLS and not spec.is_encoder:
        raise CheckpointError(f"{directory}: a decoder's first token sees no other: pooling cls.")
    width = _width(modules, spec.hidden_size)
    stages = [_dense(module, spec, device) for module in modules.dense]
    of_tokens = modules.pooling is Pooling.TOKENS
    heads = None if of_tokens else TokenHeads.read(directory, spec, device)
    state_width = spec.hidden_size if heads is None else heads.width
    return Pooler(
        modules.pooling,
        tuple(stages),
        normalize if modules.normalizes else _ACTIVATIONS["identity"],
        0 if of_tokens else width,
        width if of_tokens else state_width,
        False,
        modules.normalizes,
        modules.skips_instructions,
        token_heads=heads,
    )


def _width(modules: SentenceModules, width: int) -> int:
    """Return the width of a vector after all linear layers. width: width of a hidden state.

    Raises CheckpointError for a layer that does not fit what comes before it.
    """
    for module in modules.dense:
        if module.inputs != width:
            raise CheckpointError(
                f"{module.directory}: the linear layer reads {module.inputs} numbers, but what "
                f"comes before it has {width}."
            )
        width = module.outputs
    return width


def _lexical(
    directory: Path, spec: ModelSpec, device: torch.device, modules: SentenceModules
) -> Pooler:
    """Read the head of a checkpoint that computes weights of the vocabulary's tokens."""
    assert modules.lexical is not None
    config = Config.read(directory / "config.json")
    encoder = spec.family.encoder
    if encoder is None or not encoder.language_head:
        raise CheckpointError(
            f"{config.file}: SpladePooling is not supported for {spec.architecture}."
        )
    activation = config.text(spec.family.keys.get("hidden_act", "hidden_act"), "gelu")
    if activation != "gelu":
        raise CheckpointError(f"{config.file}: SpladePooling needs gelu, not {activation}.")
    with Checkpoint(directory) as checkpoint:
        *stages, last = encoder.language_head
        head = LexicalHead(
            tuple(_stage(checkpoint, each, spec, device, config) for each in stages),
            *_vocabulary(checkpoint, last.name, spec, device),
            modules.lexical,
        )
    return Pooler(
        Pooling.LEXICAL,
        (),
        normalize if modules.normalizes else _ACTIVATIONS["identity"],
        spec.vocab_size,
        spec.hidden_size,
        scores=False,
        normalizes=modules.normalizes,
        lexical=head,
    )


def _vocabulary(
    checkpoint: Checkpoint, name: str, spec: ModelSpec, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Read the weights and the bias that make logits; without any, the embedding's weights."""
    names = spec.family.names
    tables = [f"{name}.weight", *(f"{root}{names.embedding}.weight" for root in names.roots)]
    held = next(filter(checkpoint.holds, tables), tables[0])
    weight = _read(checkpoint, held, (spec.vocab_size, spec.hidden_size), device)
    biases = (f"{name}.bias", f"{name.rpartition('.')[0]}.bias")
    bias = next(filter(checkpoint.holds, biases), None)
    return weight, None if bias is None else _read(checkpoint, bias, weight.shape[:1], device)


def _classifier(directory: Path, spec: ModelSpec, device: torch.device) -> Pooler:
    """Read the head of a checkpoint that scores texts, or pairs of texts."""
    config = Config.read(directory / "config.json")
    pooling, is_late = _classifier_pooling(config, spec)
    with open_tensors(directory, spec) as checkpoint:
        stages = [_stage(checkpoint, each, spec, device, config) for each in spec.family.head]
    last = _last_activation(config, spec.num_labels)
    return Pooler(
        pooling,
        () if is_late else tuple(stages),
        last,
        spec.num_labels,
        spec.hidden_size,
        scores=True,
        normalizes=False,
        token_stages=tuple(stages) if is_late else (),
    )


def _classifier_pooling(config: Config, spec: ModelSpec) -> tuple[Pooling, bool]:
    """Return the pooling of a classifier, and whether its head precedes it."""
    usual = "cls" if spec.family.encoder is not None else "last"
    name = config.text(_POOLING_KEY, str(spec.family.defaults.get(_POOLING_KEY, usual)))
    if name not in _CLASSIFIER_POOLINGS:
        raise CheckpointError(
            f"{config.file}: the classifier_pooling {name} is not supported. Supported: "
            f"{', '.join(_CLASSIFIER_POOLINGS)}."
        )
    return _CLASSIFIER_POOLINGS[name], name == "late"


def _last_activation(config: Config, num_labels: int) -> Stage:
    """Return the activation that sentence-transformers applies to the logit of a single label.
    For several labels it is the one that makes probabilities, by the loss that transformers trains
    them with.
    """
    if num_labels > 1:
        kind = config.text("problem_type", "single_label_classification")
        if kind not in _CLASSES:
            raise CheckpointError(
                f"{config.file}: the problem_type {kind} is not supported. Supported: "
                f"{', '.join(_CLASSES)}."
            )
        return _CLASSES[kind]
    named = config.section("sentence_transformers")
    older = config.text("sbert_ce_default_activation_function", "Sigmoid")
    return _activation(named.text("activation_fn", older), config.file)


def _activation(name: str, file: object) -> Stage:
    stage = _ACTIVATIONS.get(name.rsplit(".", 1)[-1].lower())
    if stage is None:
        raise CheckpointError(
            f"{file}: the activation {name} is not supported. Supported: {', '.join(_ACTIVATIONS)}."
        )
    return stage


def _stage(
    checkpoint: TensorFiles, stage: HeadStage, spec: ModelSpec, device: torch.device, config: Config
) -> Stage:
    width, name = spec.hidden_size, stage.name
    outputs = (spec.num_labels + stage.is_difference) if stage.narrows else width
    shape = (width,) if stage.is_norm else (outputs, width)
    weight = _read(checkpoint, f"{name}.weight", shape, device)
    bias = None
    if checkpoint.holds(f"{name}.bias"):
        bias = _read(checkpoint, f"{name}.bias", shape[:1], device)
    if stage.is_difference:
        weight, bias = weight[:1] - weight[1:], None if bias is None else bias[:1] - bias[1:]
    if stage.is_norm:
        epsilon = spec.norm_epsilon
        return lambda rows: layer_norm(rows, rows.shape[1:], weight, bias, epsilon)
    activate = _activation(stage.activation, config.file)
    return lambda rows: activate(linear(rows, weight, bias))


def _projected_tokens(directory: Path) -> SentenceModules:
    """Return the modules of colbert-ir's checkpoints: a projection beside the encoder's weights."""
    with Checkpoint(directory) as checkpoint:
        if not checkpoint.holds("linear.weight"):
            raise CheckpointError(f"{directory} lacks the tensor linear.weight.")
        shape = checkpoint.stored("linear.weight").shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(
            f"{directory}: linear.weight must have two dimensions, not {list(shape)}."
        )
    dense = DenseModule(directory, shape[1], shape[0], has_bias=False, activation="Identity")
    return SentenceModules(Pooling.TOKENS, (dense,), normalizes=True)


def _dense(module: DenseModule, spec: ModelSpec, device: torch.device) -> Stage:
    shape = (module.outputs, module.inputs)
    if module.in_gguf:
        with open_tensors(module.directory.parent, spec) as checkpoint:
            inner = _read(checkpoint, f"{module.directory.name}.weight", shape, device)
        return lambda rows: linear(rows, inner)
    with Checkpoint(module.directory) as checkpoint:
        weight = _read(checkpoint, "linear.weight", shape, device)
        bias = None
        if module.has_bias:
            bias = _read(checkpoint, "linear.bias", shape[:1], device)
        residual = None
        if module.has_residual and module.inputs != module.outputs:
            residual = _read(checkpoint, "residual.weight", shape, device)
    activate = _activation(module.activation, module.directory / "config.json")
    if not module.has_residual:
        return lambda rows: activate(linear(rows, weight, bias))
    if residual is None:
        return lambda rows: activate(linear(rows, weight, bias)) + rows
    return lambda rows: activate(linear(rows, weight, bias)) + linear(rows, residual)


def _read(
    checkpoint: TensorFiles, name: str, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    stored = StoredTensor(name, shape)
    checkpoint.require([stored], ("*",))
    return checkpoint.tensor(stored).to(device, torch.float32, copy=True)
